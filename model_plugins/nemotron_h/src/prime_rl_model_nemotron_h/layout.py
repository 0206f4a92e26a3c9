"""Runtime tensors of Nemotron-H and their places in a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

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
from prime_rl_model_nemotron_h.architecture import ExpertSettings, NemotronHArchitecture

_PREFIXES = ("backbone.", "model.")
"""Releases write the first; transformers calls the same part by the second at run time."""
_MIXER = "layers.{i}.mixer."


def make_layout(architecture: NemotronHArchitecture) -> WeightLayout:
    """Query, key and value are fused at run time, experts stacked; the checkpoint has them apart."""
    return WeightLayout.of(
        rename("embed_tokens.weight", _leaf("embeddings.weight")),
        rename(
            "layers.{i}.norm.weight",
            _leaf("layers.{i}.norm.weight"),
            i=range(architecture.num_layers),
        ),
        *_mamba(architecture),
        *_attention(architecture),
        *_dense(architecture),
        *_experts(architecture),
        rename("norm.weight", _leaf("norm_f.weight")),
        rename("lm_head.weight", "lm_head.weight"),
        ignore("mtp.*", "multi-token prediction layers, which only a server uses", keep=True),
    )


def _leaf(name: str, dtype: str | None = None) -> Leaf:
    written, *others = (prefix + name for prefix in _PREFIXES)
    return Leaf(written, tuple(others), dtype)


def _matrix(name: str) -> Leaf:
    """A matrix that block-quantised checkpoints hold in FP8, its scales beside it."""
    leaf = _leaf(name)
    scale, *others = (f"{found}_scale_inv" for found in leaf.names)
    return Leaf(leaf.name, leaf.aliases, scale=Scale(scale, tuple(others)))


def _mamba(architecture: NemotronHArchitecture) -> Iterable[list[Entry]]:
    if architecture.mamba is None:
        return
    layers, ours = architecture.layers("mamba"), "layers.{i}.mamba."
    yield rename(ours + "project.weight", _matrix(_MIXER + "in_proj.weight"), i=layers)
    yield rename(ours + "conv.weight", _leaf(_MIXER + "conv1d.weight"), squeeze=1, i=layers)
    if architecture.mamba.conv_bias:
        yield rename(ours + "conv.bias", _leaf(_MIXER + "conv1d.bias"), i=layers)
    for name in ("dt_bias", "A_log", "D"):
        yield rename(ours + f"recurrence.{name}", _leaf(_MIXER + name, "float32"), i=layers)
    yield rename(ours + "norm.weight", _leaf(_MIXER + "norm.weight"), i=layers)
    yield rename(ours + "out.weight", _matrix(_MIXER + "out_proj.weight"), i=layers)


def _attention(architecture: NemotronHArchitecture) -> Iterable[list[Entry]]:
    settings = architecture.attention
    if settings is None:
        return
    layers, ours = architecture.layers("attention"), "layers.{i}.attention."
    heads = (settings.heads, settings.key_value_heads, settings.key_value_heads)
    yield fuse(
        ours + "qkv.weight",
        [_matrix(_MIXER + f"{name}_proj.weight") for name in "qkv"],
        sizes=[count * settings.head_dim for count in heads],
        i=layers,
    )
    yield rename(ours + "out.weight", _matrix(_MIXER + "o_proj.weight"), i=layers)


def _dense(architecture: NemotronHArchitecture) -> Iterable[list[Entry]]:
    layers = architecture.layers("mlp")
    for name in ("up", "down"):
        theirs = _matrix(_MIXER + f"{name}_proj.weight")
        yield rename("layers.{i}.mlp." + f"{name}.weight", theirs, i=layers)


def _experts(architecture: NemotronHArchitecture) -> Iterable[list[Entry]]:
    settings = architecture.experts
    if settings is None:
        return
    layers, ours = architecture.layers("moe"), "layers.{i}.mlp."
    yield rename(ours + "router.weight", _leaf(_MIXER + "gate.weight", "float32"), i=layers)
    bias = _leaf(_MIXER + "gate.e_score_correction_bias", "float32")
    yield rename(ours + "router.selection_bias", bias, i=layers)
    yield _stacked(ours + "experts.gate_up", "up_proj", settings, layers)
    yield _stacked(ours + "experts.down", "down_proj", settings, layers)
    names = {
        "shared.up": "shared_experts.up_proj",
        "shared.down": "shared_experts.down_proj",
    }
    if settings.latent_size is not None:
        names |= {"compress": "fc1_latent_proj", "expand": "fc2_latent_proj"}
    for runtime, theirs in names.items():
        yield rename(f"{ours}{runtime}.weight", _matrix(f"{_MIXER}{theirs}.weight"), i=layers)


def _stacked(
    runtime: str, name: str, settings: ExpertSettings, layers: Iterable[int]
) -> list[Entry]:
    """One tensor per expert is written; the stacked form of transformers' run time loads, too."""
    per_expert = _matrix(_MIXER + "experts.{e}." + f"{name}.weight")
    at_once = _leaf(_MIXER + f"experts.{name}")
    return stack_experts(
        runtime, [per_expert], range(settings.count), alternatives=[at_once], i=layers
    )
