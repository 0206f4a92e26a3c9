"""Runtime tensors of DeepSeek V4 and their places in a checkpoint.

Two spellings load: that of the releases, which is written, and transformers' own.
"""

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
)
from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture

_BLOCK = "layers.{i}."
_ATTENTION = _BLOCK + "attention."
_MLP = _BLOCK + "mlp."


def make_layout(architecture: DeepseekV4Architecture) -> WeightLayout:
    """Latents, key-and-gate and gate-and-up are fused at run time, experts stacked."""
    return WeightLayout.of(
        rename("embed_tokens.weight", ("embed.weight", "model.embed_tokens.weight")),
        *_blocks(architecture),
        *_attention(architecture),
        *_compressors(architecture),
        *_indexers(architecture),
        *_experts(architecture),
        *(
            rename(f"stream_head.{part}", _exact(f"hc_head_{part}", f"model.hc_head.hc_{part}"))
            for part in ("fn", "base", "scale")
        ),
        rename("norm.weight", ("norm.weight", "model.norm.weight")),
        rename("lm_head.weight", ("head.weight", "lm_head.weight")),
        ignore("mtp.*", "draft layers for speculative decoding", keep=True),
    )


def _plain(release: str, other: str) -> Leaf:
    """A tensor of the blocks under both names; templates without their `layers.{i}.` part."""
    return Leaf(_BLOCK + release, ("model." + _BLOCK + other,))


def _exact(release: str, other: str) -> Leaf:
    """A tensor that is written in float32 whatever the export's dtype."""
    return Leaf(release, (other,), dtype="float32")


def _exact_in_block(release: str, other: str) -> Leaf:
    return _exact(_BLOCK + release, "model." + _BLOCK + other)


def _quantised(release: str, other: str) -> Leaf:
    """A matrix that releases quantise; names without `.weight`."""
    scale = Scale(f"{_BLOCK}{release}.scale", (f"model.{_BLOCK}{other}.weight_scale_inv",))
    names = f"{_BLOCK}{release}.weight", f"model.{_BLOCK}{other}.weight"
    return Leaf(names[0], names[1:], scale=scale)


def _blocks(architecture: DeepseekV4Architecture) -> list[list[Entry]]:
    layers = range(architecture.num_layers)
    norms = {
        "attention_norm": _plain("attn_norm.weight", "input_layernorm.weight"),
        "mlp_norm": _plain("ffn_norm.weight", "post_attention_layernorm.weight"),
    }
    maps = [
        rename(
            f"{_BLOCK}{ours}.{part}",
            _exact_in_block(f"hc_{theirs}_{part}", f"{theirs}_hc.{part}"),
            i=layers,
        )
        for ours, theirs in (("attention_maps", "attn"), ("mlp_maps", "ffn"))
        for part in ("fn", "base", "scale")
    ]
    return [
        *maps,
        *(rename(f"{_BLOCK}{ours}.weight", leaf, i=layers) for ours, leaf in norms.items()),
    ]


def _attention(architecture: DeepseekV4Architecture) -> list[list[Entry]]:
    layers = range(architecture.num_layers)
    names = {
        "query_norm.weight": _plain("attn.q_norm.weight", "self_attn.q_a_norm.weight"),
        "query.weight": _quantised("attn.wq_b", "self_attn.q_b_proj"),
        "key_norm.weight": _plain("attn.kv_norm.weight", "self_attn.kv_norm.weight"),
        "sink.logit": _exact_in_block("attn.attn_sink", "self_attn.sinks"),
        "out_groups.weight": _quantised("attn.wo_a", "self_attn.o_a_proj"),
        "out.weight": _quantised("attn.wo_b", "self_attn.o_b_proj"),
    }
    latent = fuse(
        _ATTENTION + "latent.weight",
        [
            _quantised("attn.wq_a", "self_attn.q_a_proj"),
            _quantised("attn.wkv", "self_attn.kv_proj"),
        ],
        sizes=(architecture.query_rank, architecture.head_dim),
        i=layers,
    )
    return [latent, *(rename(_ATTENTION + ours, leaf, i=layers) for ours, leaf in names.items())]


def _compressors(architecture: DeepseekV4Architecture) -> list[list[Entry]]:
    layers = [number for number, layer in enumerate(architecture.layers) if layer.ratio]
    return _compressor("compressor", "attn.compressor", "self_attn.compressor", layers)


def _compressor(ours: str, release: str, other: str, layers: list[int]) -> list[list[Entry]]:
    return [
        fuse(
            f"{_ATTENTION}{ours}.project.weight",
            [
                _plain(f"{release}.wkv.weight", f"{other}.kv_proj.weight"),
                _plain(f"{release}.wgate.weight", f"{other}.gate_proj.weight"),
            ],
            i=layers,
        ),
        rename(
            f"{_ATTENTION}{ours}.position_bias.bias",
            _exact_in_block(f"{release}.ape", f"{other}.position_bias"),
            i=layers,
        ),
        rename(
            f"{_ATTENTION}{ours}.norm.weight",
            _plain(f"{release}.norm.weight", f"{other}.kv_norm.weight"),
            i=layers,
        ),
    ]


def _indexers(architecture: DeepseekV4Architecture) -> list[list[Entry]]:
    layers = [n for n, layer in enumerate(architecture.layers) if layer.kind == "csa"]
    other = "self_attn.compressor.indexer"
    weights = _plain("attn.indexer.weights_proj.weight", f"{other}.scorer.weights_proj.weight")
    return [
        *_compressor("indexer.compressor", "attn.indexer.compressor", other, layers),
        rename(
            _ATTENTION + "indexer.query.weight",
            _quantised("attn.indexer.wq_b", f"{other}.q_b_proj"),
            i=layers,
        ),
        rename(_ATTENTION + "indexer.weights.weight", weights, i=layers),
    ]


def _experts(architecture: DeepseekV4Architecture) -> list[list[Entry]]:
    layers = range(architecture.num_layers)
    hashed = architecture.hash_layers
    routed = [layer for layer in layers if layer not in hashed]
    table = Leaf(
        _BLOCK + "ffn.gate.tid2eid", ("model." + _BLOCK + "mlp.gate.tid2eid",), dtype="int64"
    )
    bias = _exact_in_block("ffn.gate.bias", "mlp.gate.e_score_correction_bias")
    shared = {
        part: _quantised(f"ffn.shared_experts.{part}", f"mlp.shared_experts.{name}_proj")
        for part, name in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    }
    return [
        rename(_MLP + "router.weight", _plain("ffn.gate.weight", "mlp.gate.weight"), i=layers),
        rename(_MLP + "router.selection_bias", bias, i=routed),
        rename(_MLP + "token_experts", table, i=hashed),
        _stacked(architecture, "gate_up", ("w1", "w3"), "gate_up_proj"),
        _stacked(architecture, "down", ("w2",), "down_proj"),
        fuse(_MLP + "shared.gate_up.weight", [shared["w1"], shared["w3"]], i=layers),
        rename(_MLP + "shared.down.weight", shared["w2"], i=layers),
    ]


def _stacked(
    architecture: DeepseekV4Architecture, ours: str, parts: tuple[str, ...], stacked: str
) -> list[Entry]:
    """One tensor per expert in releases; transformers holds a layer's experts in one."""
    release = _BLOCK + "ffn.experts.{e}."
    other = f"model.{_BLOCK}mlp.experts.{stacked}"
    return stack_experts(
        f"{_MLP}experts.{ours}",
        [Leaf(f"{release}{w}.weight", scale=Scale(f"{release}{w}.scale")) for w in parts],
        range(architecture.experts.count),
        alternatives=[Leaf(other, scale=Scale(f"{other}_scale_inv"))],
        i=range(architecture.num_layers),
    )
