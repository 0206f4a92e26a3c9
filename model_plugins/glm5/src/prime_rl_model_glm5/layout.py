"""Runtime tensors of GLM-5 and their places in a Hugging Face checkpoint."""

from __future__ import annotations

from prime_rl.api.layout import (
    Entry,
    Leaf,
    Scale,
    WeightLayout,
    fuse,
    ignore,
    rename,
    stack_experts,
    tie,
)
from prime_rl_model_glm5.architecture import Glm5Architecture

_BLOCK = "model.layers.{i}."
_ATTENTION = _BLOCK + "self_attn."
_INDEXER = _ATTENTION + "indexer."
_MLP = _BLOCK + "mlp."


def make_layout(architecture: Glm5Architecture) -> WeightLayout:
    """The two latent projections and gate/up are fused at run time, experts stacked; the checkpoint
    has them apart. FP8 releases hold 128 x 128 block scales beside their matrices."""
    layers = range(architecture.num_layers)
    return WeightLayout.of(
        rename("embed_tokens.weight", "model.embed_tokens.weight"),
        rename("layers.{i}.input_norm.weight", _BLOCK + "input_layernorm.weight", i=layers),
        *_attention(architecture),
        *_indexer(architecture),
        rename("layers.{i}.mlp_norm.weight", _BLOCK + "post_attention_layernorm.weight", i=layers),
        *_gated_mlp("layers.{i}.mlp.", _MLP, architecture.dense_layers),
        *_experts(architecture),
        rename("norm.weight", "model.norm.weight"),
        tie("lm_head.weight")
        if architecture.tie_word_embeddings
        else rename("lm_head.weight", "lm_head.weight"),
        *(
            ignore(
                f"model.layers.{architecture.num_layers + number}.*",
                "draft layers, which only a speculating server uses",
                keep=True,
            )
            for number in range(architecture.draft_layers)
        ),
    )


def _matrix(name: str) -> Leaf:
    """A weight that releases may quantise in blocks."""
    return Leaf(name, scale=Scale(f"{name}_scale_inv"))


def _attention(architecture: Glm5Architecture) -> list[list[Entry]]:
    layers, sizes = range(architecture.num_layers), architecture.attention
    runtime = "layers.{i}.attention."
    return [
        fuse(
            runtime + "latents.weight",
            [
                _matrix(_ATTENTION + "q_a_proj.weight"),
                _matrix(_ATTENTION + "kv_a_proj_with_mqa.weight"),
            ],
            sizes=(sizes.query_rank, sizes.latent_dim + sizes.rotary_dim),
            i=layers,
        ),
        rename(runtime + "query_norm.weight", _ATTENTION + "q_a_layernorm.weight", i=layers),
        rename(runtime + "query.weight", _matrix(_ATTENTION + "q_b_proj.weight"), i=layers),
        rename(runtime + "latent_norm.weight", _ATTENTION + "kv_a_layernorm.weight", i=layers),
        rename(runtime + "key_value.weight", _matrix(_ATTENTION + "kv_b_proj.weight"), i=layers),
        rename(runtime + "out.weight", _matrix(_ATTENTION + "o_proj.weight"), i=layers),
    ]


def _indexer(architecture: Glm5Architecture) -> list[list[Entry]]:
    layers = architecture.indexing.full_layers
    runtime = "layers.{i}.attention.indexer."
    return [
        rename(runtime + "query.weight", _matrix(_INDEXER + "wq_b.weight"), i=layers),
        rename(runtime + "key.weight", _matrix(_INDEXER + "wk.weight"), i=layers),
        rename(runtime + "key_norm.weight", _INDEXER + "k_norm.weight", i=layers),
        rename(runtime + "key_norm.bias", _INDEXER + "k_norm.bias", i=layers),
        rename(
            runtime + "head_weights.weight", _matrix(_INDEXER + "weights_proj.weight"), i=layers
        ),
    ]


def _gated_mlp(runtime: str, name: str, layers: tuple[int, ...]) -> list[list[Entry]]:
    gate_up = [_matrix(f"{name}{kind}_proj.weight") for kind in ("gate", "up")]
    return [
        fuse(runtime + "gate_up.weight", gate_up, i=layers),
        rename(runtime + "down.weight", _matrix(name + "down_proj.weight"), i=layers),
    ]


def _experts(architecture: Glm5Architecture) -> list[list[Entry]]:
    """Stacked experts; checkpoints that hold them already stacked load, too."""
    layers, experts = architecture.moe_layers, range(architecture.experts.count)
    runtime = "layers.{i}.mlp."
    one = _MLP + "experts.{e}."
    stacked = _MLP + "experts."
    return [
        rename(runtime + "router.weight", _MLP + "gate.weight", i=layers),
        rename(
            runtime + "router.selection_bias",
            Leaf(_MLP + "gate.e_score_correction_bias", dtype="float32"),
            i=layers,
        ),
        stack_experts(
            runtime + "experts.gate_up",
            [_matrix(one + "gate_proj.weight"), _matrix(one + "up_proj.weight")],
            experts,
            alternatives=[Leaf(stacked + "gate_up_proj", (stacked + "gate_up_proj.weight",))],
            i=layers,
        ),
        stack_experts(
            runtime + "experts.down",
            [_matrix(one + "down_proj.weight")],
            experts,
            alternatives=[Leaf(stacked + "down_proj", (stacked + "down_proj.weight",))],
            i=layers,
        ),
        *_gated_mlp(runtime + "shared.", _MLP + "shared_experts.", layers),
    ]
