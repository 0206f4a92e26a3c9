"""Runtime tensors of Qwen3.8 and their places in a checkpoint.

Written are the names of the released bf16 checkpoint. Read are also those of transformers: the
prefix `model.` alone, one tensor per expert, and an n-gram table in one piece.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prime_rl.api.layout import (
    Cat,
    Entry,
    Ignored,
    Leaf,
    Scale,
    Stack,
    WeightLayout,
    fuse,
    ignore,
    rename,
    tie,
)
from prime_rl_model_qwen3_8.architecture import Qwen38Architecture, SparseSizes

_PREFIXES = ("model.language_model.", "model.")
_BLOCK = "layers.{i}."


def make_layout(architecture: Qwen38Architecture) -> WeightLayout:
    """Projections that share their input are fused at run time; the checkpoint has them apart."""
    layers = range(architecture.num_layers)
    return WeightLayout.of(
        rename("embed_tokens.weight", _leaf("embed_tokens.weight")),
        *(
            rule
            for ordinal in range(len(architecture.tables))
            for rule in _table(architecture, ordinal)
        ),
        *_injections(architecture),
        *_streams(architecture, "mixer_streams", "attn_hyper_connection", layers),
        *_delta(architecture),
        *(_sparse(architecture.sparse, architecture.sparse_layers) if architecture.sparse else ()),
        *_streams(architecture, "mlp_streams", "mlp_hyper_connection", layers),
        *_experts(architecture),
        rename("final_streams.norm.weight", _leaf("hyper_connection_mixer.hc_norm.weight")),
        rename(
            "final_streams.down.weight",
            _leaf("hyper_connection_mixer.input_mix_weight_down.weight"),
        ),
        rename(
            "final_streams.up.weight", _leaf("hyper_connection_mixer.input_mix_weight_up.weight")
        ),
        tie("lm_head.weight")
        if architecture.tie_word_embeddings
        else rename("lm_head.weight", "lm_head.weight"),
        *_unused(),
    )


def _leaf(name: str, dtype: str | None = None, *, quantised: bool = False) -> Leaf:
    """A tensor of the language model under both prefixes; FP8 releases have scales beside some."""
    names = [prefix + name for prefix in _PREFIXES]
    scales = [full + "_scale_inv" for full in names]
    scale = Scale(scales[0], tuple(scales[1:])) if quantised else None
    return Leaf(names[0], tuple(names[1:]), dtype, scale)


def _table_leaf(stem: str, part: str) -> Leaf:
    """A part of an n-gram table. In FP8 releases one number scales all parts."""
    names = [f"{prefix}{stem}.{part}" for prefix in _PREFIXES]
    scales = [f"{prefix}{stem}.weight_scale" for prefix in _PREFIXES]
    return Leaf(names[0], tuple(names[1:]), scale=Scale(scales[0], tuple(scales[1:]), block=None))


def _fused(
    runtime: str, names: Sequence[str], sizes: Sequence[int], layers: Iterable[int]
) -> list[Entry]:
    return fuse(runtime, [_leaf(name) for name in names], sizes=sizes, i=layers)


def _streams(
    architecture: Qwen38Architecture, runtime: str, theirs: str, layers: Iterable[int]
) -> Iterable[list[Entry]]:
    ours, stored = f"{_BLOCK}{runtime}.", f"{_BLOCK}{theirs}."
    return (
        rename(ours + "norm.weight", _leaf(stored + "hc_norm.weight"), i=layers),
        _fused(
            ours + "down.weight",
            [stored + "input_mix_weight_down.weight", stored + "block_inject_weight.weight"],
            (architecture.mix_rank, architecture.streams),
            layers,
        ),
        rename(ours + "up.weight", _leaf(stored + "input_mix_weight_up.weight"), i=layers),
    )


def _delta(architecture: Qwen38Architecture) -> Iterable[list[Entry]]:
    layers, sizes = architecture.delta_layers, architecture.delta
    ours, stored = _BLOCK + "delta.", _BLOCK + "linear_attn."
    widths = (sizes.qkv_width, sizes.value_width, sizes.value_heads, sizes.value_heads)
    return (
        _fused(
            ours + "in_proj.weight",
            [f"{stored}in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")],
            widths,
            layers,
        ),
        rename(ours + "conv", _leaf(stored + "conv1d.weight"), squeeze=1, i=layers),
        rename(ours + "decay.a_log", _leaf(stored + "A_log", "float32"), i=layers),
        rename(ours + "decay.dt_bias", _leaf(stored + "dt_bias", "float32"), i=layers),
        rename(ours + "norm", _leaf(stored + "norm.weight"), i=layers),
        rename(ours + "out_proj.weight", _leaf(stored + "out_proj.weight"), i=layers),
    )


def _sparse(sizes: SparseSizes, layers: Iterable[int]) -> Iterable[list[Entry]]:
    ours, stored = _BLOCK + "attention.", _BLOCK + "self_attn."
    width = sizes.key_value_heads * sizes.head_dim
    return (
        _fused(
            ours + "qkv.weight",
            [f"{stored}{name}_proj.weight" for name in "qkv"],
            (2 * sizes.heads * sizes.head_dim, width, width),
            layers,
        ),
        rename(ours + "q_norm.weight", _leaf(stored + "q_norm.weight"), i=layers),
        rename(ours + "k_norm.weight", _leaf(stored + "k_norm.weight"), i=layers),
        rename(ours + "out.weight", _leaf(stored + "o_proj.weight"), i=layers),
        *(
            rename(
                f"{ours}indexer.{mine}.weight", _leaf(f"{stored}indexer.{theirs}.weight"), i=layers
            )
            for mine, theirs in (
                ("proj", "index_qk_proj"),
                ("q_norm", "q_layernorm"),
                ("k_norm", "k_layernorm"),
            )
        ),
    )


def _experts(architecture: Qwen38Architecture) -> Iterable[list[Entry]]:
    """The experts of a layer are stacked in the bf16 release, apart in FP8 and in transformers."""
    layers, experts = range(architecture.num_layers), range(architecture.experts.count)
    ours, stored = _BLOCK + "mlp.", _BLOCK + "mlp."

    def apart(*names: str) -> Stack:
        """One tensor per expert, or several fused by rows."""
        stacked = []
        for expert in experts:
            leaves = tuple(
                _leaf(f"{stored}experts.{expert}.{name}.weight", quantised=True) for name in names
            )
            stacked.append(leaves[0] if len(leaves) == 1 else Cat(leaves))
        return Stack(tuple(stacked))

    def together(name: str) -> Leaf:
        full = f"{stored}experts.{name}"
        names = [prefix + full + suffix for suffix in ("", ".weight") for prefix in _PREFIXES]
        return Leaf(names[0], tuple(names[1:]))

    return (
        rename(ours + "router.weight", _leaf(stored + "gate.weight"), i=layers),
        rename(
            ours + "experts.gate_up",
            together("gate_up_proj"),
            alternatives=[apart("gate_proj", "up_proj")],
            i=layers,
        ),
        rename(
            ours + "experts.down",
            together("down_proj"),
            alternatives=[apart("down_proj")],
            i=layers,
        ),
        fuse(
            ours + "shared.gate_up.weight",
            [
                _leaf(f"{stored}shared_expert.{n}_proj.weight", quantised=True)
                for n in ("gate", "up")
            ],
            i=layers,
        ),
        rename(
            ours + "shared.down.weight",
            _leaf(stored + "shared_expert.down_proj.weight", quantised=True),
            i=layers,
        ),
        rename(ours + "shared_gate.weight", _leaf(stored + "shared_expert_gate.weight"), i=layers),
    )


def _table(architecture: Qwen38Architecture, ordinal: int) -> Iterable[list[Entry]]:
    table = architecture.tables[ordinal]
    ours, stored = f"ngrams.{ordinal}.", f"layers.{table.layer}.ple.ple_embedding."
    stem = stored + "ngram_embedding"
    parts = range(len(table.part_sizes))
    return (
        fuse(
            ours + "table.weight",
            [_table_leaf(stem, f"shard_{part}.weight") for part in parts],
            sizes=table.part_sizes,
            alternatives=[_table_leaf(stem, "weight")],
        ),
        rename(ours + "multipliers", _leaf(stored + "layer_multipliers")),
        rename(ours + "sizes", _leaf(stored + "ngram_heads_vocab_sizes")),
        rename(ours + "offsets", _leaf(stored + "ngram_heads_offsets")),
    )


def _injections(architecture: Qwen38Architecture) -> Iterable[list[Entry]]:
    layers = [table.layer for table in architecture.tables]
    if not layers:
        return ()
    hidden = architecture.hidden_size
    ours, stored = _BLOCK + "ngram.", _BLOCK + "ple."
    return (
        _fused(
            ours + "key_value.weight",
            [stored + "key_proj.weight", stored + "value_proj.weight"],
            (architecture.streams * hidden, hidden),
            layers,
        ),
        *(
            rename(f"{ours}{name}_norm.weight", _leaf(f"{stored}norm_{name}.weight"), i=layers)
            for name in ("key", "query", "conv")
        ),
        rename(ours + "conv", _leaf(stored + "conv1d.weight"), squeeze=1, i=layers),
    )


def _unused() -> Iterable[list[Ignored]]:
    return (
        ignore("model.visual.*", "the vision tower, served but not trained", keep=True),
        ignore("mtp.*", "the draft head, served but not trained", keep=True),
        ignore("*.ple_embedding.hashstats_*", "statistics of the hash, of no use"),
        ignore("*.ple_embedding.token_lookup*", "a cache of a server, of no use"),
    )
