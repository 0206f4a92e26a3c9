"""Runtime tensors of Qwen3 and their places in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

from prime_rl.api.layout import Entry, Leaf, WeightLayout, fuse, rename, stack_experts, tie
from prime_rl_model_qwen3.architecture import Qwen3Architecture

_BLOCK = "model.layers.{i}."


def make_layout(architecture: Qwen3Architecture) -> WeightLayout:
    """QKV and gate/up are fused at run time, experts stacked; the checkpoint has them apart."""
    layers = range(architecture.num_layers)
    attention = _BLOCK + "self_attn."
    return WeightLayout.of(
        rename("embed_tokens.weight", "model.embed_tokens.weight"),
        rename("layers.{i}.input_norm.weight", _BLOCK + "input_layernorm.weight", i=layers),
        _fused_qkv(architecture, "weight"),
        rename("layers.{i}.attention.q_norm.weight", attention + "q_norm.weight", i=layers),
        rename("layers.{i}.attention.k_norm.weight", attention + "k_norm.weight", i=layers),
        rename("layers.{i}.attention.out.weight", attention + "o_proj.weight", i=layers),
        *_biases(architecture),
        rename("layers.{i}.mlp_norm.weight", _BLOCK + "post_attention_layernorm.weight", i=layers),
        fuse(
            "layers.{i}.mlp.gate_up.weight",
            [_BLOCK + "mlp.gate_proj.weight", _BLOCK + "mlp.up_proj.weight"],
            i=architecture.dense_layers,
        ),
        rename(
            "layers.{i}.mlp.down.weight",
            _BLOCK + "mlp.down_proj.weight",
            i=architecture.dense_layers,
        ),
        *_experts(architecture),
        rename("norm.weight", "model.norm.weight"),
        tie("lm_head.weight")
        if architecture.tie_word_embeddings
        else rename("lm_head.weight", "lm_head.weight"),
    )


def _fused_qkv(architecture: Qwen3Architecture, kind: str) -> list[Entry]:
    query = architecture.num_heads * architecture.head_dim
    key = architecture.num_key_value_heads * architecture.head_dim
    return fuse(
        "layers.{i}.attention.qkv." + kind,
        [_BLOCK + f"self_attn.{name}_proj.{kind}" for name in "qkv"],
        sizes=(query, key, key),
        i=range(architecture.num_layers),
    )


def _biases(architecture: Qwen3Architecture) -> Iterable[list[Entry]]:
    if not architecture.attention_bias:
        return ()
    layers = range(architecture.num_layers)
    return (
        _fused_qkv(architecture, "bias"),
        rename("layers.{i}.attention.out.bias", _BLOCK + "self_attn.o_proj.bias", i=layers),
    )


def _experts(architecture: Qwen3Architecture) -> Iterable[list[Entry]]:
    """Stacked experts; checkpoints that hold them already stacked load, too."""
    if architecture.experts is None:
        return ()
    layers, experts = architecture.moe_layers, range(architecture.experts.count)
    mlp = _BLOCK + "mlp."
    return (
        rename("layers.{i}.mlp.router.weight", mlp + "gate.weight", i=layers),
        stack_experts(
            "layers.{i}.mlp.experts.gate_up",
            [mlp + "experts.{e}.gate_proj.weight", mlp + "experts.{e}.up_proj.weight"],
            experts,
            alternatives=[
                Leaf(mlp + "experts.gate_up_proj", (mlp + "experts.gate_up_proj.weight",))
            ],
            i=layers,
        ),
        stack_experts(
            "layers.{i}.mlp.experts.down",
            [mlp + "experts.{e}.down_proj.weight"],
            experts,
            alternatives=[Leaf(mlp + "experts.down_proj", (mlp + "experts.down_proj.weight",))],
            i=layers,
        ),
    )
