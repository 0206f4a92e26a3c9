"""config.json of GLM-5: spellings that are read, values that are refused, the released sizes."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from prime_rl_model_glm5 import Glm5
from prime_rl_model_glm5.flops import attention_flops, indexer_flops
from transformers import GlmMoeDsaConfig

from prime_rl.api import Kernels
from prime_rl.errors import ConfigError
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.models.load import runtime_tensors

RELEASED = {
    path.stem: json.loads(path.read_text())
    for path in (Path(__file__).parent / "released").glob("*.json")
}
"""config.json of GLM-5 and GLM-5.2, written from the published sizes."""
INDEXER = 4096 * 2048 + 128 * 6144 + 2 * 128 + 32 * 6144
"""Numbers in one indexer: 9.37 million."""


def plugin() -> Glm5:
    return Glm5(Glm5.Config(type="glm5"))


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


def test_schedule_from_every_key(tiny: Any) -> None:
    """One schedule of six layers, spelt by each key; transformers agrees with the fallbacks."""
    bare = without(tiny, "indexer_types", "index_topk_pattern")
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({"indexer_types": tiny["indexer_types"]}, (0, 1, 3)),
        ({"index_topk_pattern": "FFSFSS"}, (0, 1, 3)),
        ({"index_topk_pattern": ["full", "full", "shared", "full", "shared", "shared"]}, (0, 1, 3)),
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, (0, 1, 2)),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 0}, (1, 3, 5)),
        ({"index_topk_freq": 3}, (0, 1, 4)),
        ({"index_topk_freq": 1}, (0, 1, 2, 3, 4, 5)),
        ({}, (0, 1, 2, 3, 4, 5)),
    ]
    for keys, full in cases:
        config = {**bare, **keys}
        theirs = GlmMoeDsaConfig(**without(config, "model_type")).indexer_types
        assert tuple(i for i, kind in enumerate(theirs) if kind == "full") == full, keys
        if full[0] == 0:
            assert plugin().architecture(config).indexing.full_layers == full, keys
        else:
            with pytest.raises(ConfigError, match="index_topk_freq: layer 0 is 'shared'"):
                plugin().architecture(config)


def test_schedules_that_disagree_are_refused(tiny: Any) -> None:
    """transformers would train one and vLLM serve the other."""
    frequency = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    with pytest.raises(ConfigError, match="indexer_types makes layer 2 'shared'.*index_topk_freq"):
        plugin().architecture({**tiny, **frequency})
    with pytest.raises(ConfigError, match="layer 5 'shared' and index_topk_pattern .* 'full'"):
        plugin().architecture({**tiny, "index_topk_pattern": "FFSFSF"})


def test_released_schedule_is_every_fourth_layer() -> None:
    """freq 4, offset 3 is the released list of 21 full layers."""
    config = RELEASED["glm_5_2"]
    regular = {"index_topk_freq": 4, "index_skip_topk_offset": 3}
    listed = plugin().architecture(config)
    assert plugin().architecture({**config, **regular}) == listed
    assert plugin().architecture({**without(config, "indexer_types"), **regular}) == listed
    assert len(listed.indexing.full_layers) == 21
    assert listed.indexing.full_layers[:5] == (0, 1, 2, 6, 10)


def test_head_dim_is_not_the_rotary_width() -> None:
    """64 in one release, 192 in another; frequencies follow qk_rope_head_dim."""
    config = RELEASED["glm_5_2"]
    read = plugin().architecture(config)
    assert plugin().architecture({**config, "head_dim": 64}) == read
    frequencies = read.rotary.inverse_frequencies
    assert len(frequencies) == 32 and frequencies[1] == pytest.approx(8e6 ** (-2 / 64))


def test_older_spelling_of_theta(tiny: Any) -> None:
    flat = {**without(tiny, "rope_parameters"), "rope_theta": 8e6}
    assert plugin().architecture(flat) == plugin().architecture(tiny)
    with pytest.raises(ConfigError, match="rope_theta is missing"):
        plugin().architecture(without(tiny, "rope_parameters"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("scoring_func", "softmax"),
        ("topk_method", "greedy"),
        ("indexer_rope_interleave", False),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("moe_layer_freq", 2),
        ("num_key_value_heads", 2),
        ("qk_rope_head_dim", 7),
        ("index_head_dim", 4),
        ("indexer_types", ["full"] * 5),
        ("indexer_types", ["full", "full", "shared", "full", "shared", "none"]),
        ("index_topk_pattern", "FFSFSX"),
        ("index_topk_pattern", 3),
        ("mlp_layer_types", ["dense", "sparse"]),
        ("n_group", 3),
        ("topk_group", 2),
        ("num_experts_per_tok", 9),
        ("n_shared_experts", 0),
        ("index_topk", 0),
        ("q_lora_rank", None),
    ],
)
def test_what_is_refused_is_named(key: str, value: object, tiny: Any) -> None:
    with pytest.raises(ConfigError, match=key):
        plugin().architecture({**tiny, key: value})


def test_other_rope_types_are_refused(tiny: Any) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 8e6, "factor": 4.0}
    with pytest.raises(ConfigError, match="rope_type"):
        plugin().architecture({**tiny, "rope_parameters": yarn})


def released_tensors(full_layers: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a released checkpoint, draft layer apart."""
    yield "model.embed_tokens.weight", (154880, 6144)
    yield "model.norm.weight", (6144,)
    yield "lm_head.weight", (154880, 6144)
    for layer in range(78):
        block = f"model.layers.{layer}."
        yield block + "input_layernorm.weight", (6144,)
        yield block + "post_attention_layernorm.weight", (6144,)
        attention = block + "self_attn."
        yield attention + "q_a_proj.weight", (2048, 6144)
        yield attention + "q_a_layernorm.weight", (2048,)
        yield attention + "q_b_proj.weight", (16384, 2048)
        yield attention + "kv_a_proj_with_mqa.weight", (576, 6144)
        yield attention + "kv_a_layernorm.weight", (512,)
        yield attention + "kv_b_proj.weight", (28672, 512)
        yield attention + "o_proj.weight", (6144, 16384)
        if layer in full_layers:
            yield attention + "indexer.wq_b.weight", (4096, 2048)
            yield attention + "indexer.wk.weight", (128, 6144)
            yield attention + "indexer.k_norm.weight", (128,)
            yield attention + "indexer.k_norm.bias", (128,)
            yield attention + "indexer.weights_proj.weight", (32, 6144)
        if layer < 3:
            yield from released_mlp(block + "mlp.", 12288)
            continue
        yield block + "mlp.gate.weight", (256, 6144)
        yield block + "mlp.gate.e_score_correction_bias", (256,)
        for expert in range(256):
            yield from released_mlp(f"{block}mlp.experts.{expert}.", 2048)
        yield from released_mlp(block + "mlp.shared_experts.", 2048)


def released_mlp(block: str, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield block + "gate_proj.weight", (width, 6144)
    yield block + "up_proj.weight", (width, 6144)
    yield block + "down_proj.weight", (6144, width)


@pytest.mark.parametrize(("name", "indexers"), [("glm_5", 78), ("glm_5_2", 21)])
def test_released_sizes_on_the_meta_device(name: str, indexers: int) -> None:
    """Built within 30 s; every released tensor, its shape, and the published number of weights:
    743.38 billion with 21 indexers of together 196.8 million."""
    config = RELEASED[name]
    started = time.monotonic()
    architecture = plugin().architecture(config)
    kernels = Kernels(
        TorchAttention(TorchAttentionConfig()),
        [TorchMoE(TorchMoEConfig())] * 78,
        TorchDSA(TorchDSAConfig()),
    )
    with torch.device("meta"):
        module = plugin().build(architecture, kernels)
    tensors = runtime_tensors(module)
    layout = plugin().layout(architecture)
    layout.check_runtime(tensors)
    assert time.monotonic() - started < 30
    assert round(21 * INDEXER / 1e6, 1) == 196.8
    parameters = sum(parameter.numel() for parameter in module.parameters())
    assert round((parameters - (indexers - 21) * INDEXER) / 1e9, 2) == 743.38
    rows = layout.table({key: tuple(tensor.shape) for key, tensor in tensors.items()})
    full_layers = architecture.indexing.full_layers
    assert len(full_layers) == indexers
    assert {row.name: row.shape for row in rows} == dict(released_tensors(full_layers))
    assert all(layout.runtime_for(row.name) == row.runtimes for row in rows)
    holders = Counter(runtime for row in rows for runtime in row.runtimes)
    assert holders.keys() == tensors.keys()
    assert holders["layers.3.mlp.experts.gate_up"] == 512
    draft = "model.layers.78.mlp.experts.0.gate_proj.weight"
    assert layout.is_kept(draft) and layout.is_kept(draft + "_scale_inv")
    assert not layout.is_ignored("model.layers.7.eh_proj.weight")


@pytest.mark.parametrize(
    ("length", "attention", "indexer"),
    [(4096, 50.1, 0.7), (16384, 62.6, 1.8), (131072, 66.2, 11.7)],
)
def test_training_flops_of_the_released_size(length: int, attention: float, indexer: float) -> None:
    """GFLOP per token as the spec states them, to the digit it gives: matrices 240.6 forward and
    backward, attention in absorbed form, indexers forward only."""
    architecture = plugin().architecture(RELEASED["glm_5_2"])
    lengths = [length]
    giga = length * 1e9
    total = plugin().flops(architecture, lengths)
    attending, indexing = (
        attention_flops(architecture, lengths),
        indexer_flops(architecture, lengths),
    )
    assert round(3 * (total - attending - indexing) / giga, 1) == 240.6
    assert round(3 * attending / giga, 1) == attention
    assert round(indexing / giga, 1) == indexer


def test_flops_by_hand(tiny: Any) -> None:
    """The tiny config, documents of 3 and 20 tokens, 8 keys a query at most."""
    pairs = (1 + 2 + 3) + (8 * 9 // 2 + 12 * 8)
    visible = 3 * 4 // 2 + 20 * 21 // 2
    attention = 64 * 48 + 48 * 4 * 20 + 64 * 40 + 32 * 4 * 28 + 4 * 16 * 64
    sparse = 64 * 8 + 3 * 3 * 64 * 32
    matrices = 6 * attention + 2 * 3 * 64 * 96 + 4 * sparse + 64 * 128
    indexers = 3 * (2 * (48 * 256 + 64 * 16 + 64 * 16) * 23 + 2 * 16 * 16 * visible)
    expected = 2 * matrices * 23 + 6 * 2 * 4 * (32 + 8 + 32) * pairs + indexers
    assert plugin().flops(plugin().architecture(tiny), [3, 20]) == expected
