"""The released sizes on the meta device: parameters, names, shapes, operations; config.json read."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from prime_rl_model_deepseek_v4 import DeepseekV4
from prime_rl_model_deepseek_v4.flops import attended_rows, indexer_flops, visible_entries

from prime_rl.api import Kernels
from prime_rl.errors import ConfigError
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.models.load import runtime_tensors

PLUGIN = DeepseekV4(DeepseekV4.Config())
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"


def released(name: str) -> dict[str, Any]:
    """config.json as the tables of the release say."""
    config: dict[str, Any] = json.loads(
        (Path(__file__).parent / "released" / f"{name}.json").read_text()
    )
    return config


def on_meta(config: dict[str, Any]) -> torch.nn.Module:
    architecture = PLUGIN.architecture(config)
    kernels = Kernels(
        TorchAttention(TorchAttentionConfig()),
        [TorchMoE(TorchMoEConfig())] * architecture.num_layers,
        TorchDSA(TorchDSAConfig()),
    )
    with torch.device("meta"):
        return PLUGIN.build(architecture, kernels)


def released_names(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a release with its unpacked shape, draft layers and scales left out."""
    d, heads, size = config["hidden_size"], config["num_attention_heads"], config["head_dim"]
    rank, groups, out = config["q_lora_rank"], config["o_groups"], config["o_lora_rank"]
    experts, width = config["n_routed_experts"], config["moe_intermediate_size"]
    ih, isize, v = config["index_n_heads"], config["index_head_dim"], config["vocab_size"]
    names: dict[str, tuple[int, ...]] = {
        "embed.weight": (v, d),
        "head.weight": (v, d),
        "norm.weight": (d,),
        "hc_head_fn": (4, 4 * d),
        "hc_head_base": (4,),
        "hc_head_scale": (1,),
    }
    for layer in range(config["num_hidden_layers"]):
        ratio = config["compress_ratios"][layer]
        block: dict[str, tuple[int, ...]] = {
            "attn_norm.weight": (d,),
            "ffn_norm.weight": (d,),
            "attn.attn_sink": (heads,),
            "attn.wq_a.weight": (rank, d),
            "attn.q_norm.weight": (rank,),
            "attn.wq_b.weight": (heads * size, rank),
            "attn.wkv.weight": (size, d),
            "attn.kv_norm.weight": (size,),
            "attn.wo_a.weight": (groups * out, heads * size // groups),
            "attn.wo_b.weight": (d, groups * out),
            "ffn.gate.weight": (experts, d),
        }
        for part in ("attn", "ffn"):
            block |= {f"hc_{part}_fn": (24, 4 * d), f"hc_{part}_base": (24,)}
            block |= {f"hc_{part}_scale": (3,)}
        both = {4: 2, 128: 1}.get(ratio)
        if both:
            block |= {f"attn.compressor.{w}.weight": (both * size, d) for w in ("wkv", "wgate")}
            block |= {"attn.compressor.ape": (ratio, both * size)}
            block |= {"attn.compressor.norm.weight": (size,)}
        if ratio == 4:
            inner = {f"compressor.{w}.weight": (2 * isize, d) for w in ("wkv", "wgate")}
            inner |= {"compressor.ape": (4, 2 * isize), "compressor.norm.weight": (isize,)}
            inner |= {"wq_b.weight": (ih * isize, rank), "weights_proj.weight": (ih, d)}
            block |= {f"attn.indexer.{name}": shape for name, shape in inner.items()}
        if layer < config["num_hash_layers"]:
            block["ffn.gate.tid2eid"] = (v, 6)
        else:
            block["ffn.gate.bias"] = (experts,)
        for part in ("shared_experts", *(f"experts.{e}" for e in range(experts))):
            block |= {f"ffn.{part}.{w}.weight": (width, d) for w in ("w1", "w3")}
            block |= {f"ffn.{part}.w2.weight": (d, width)}
        names |= {f"layers.{layer}.{name}": shape for name, shape in block.items()}
    return names


@pytest.mark.parametrize(("name", "billions"), [("flash", 284.33), ("pro", None)])
def test_full_size(name: str, billions: float | None) -> None:
    """Built in seconds; the count of the release; every name there and back, with its shape."""
    config = released(name)
    start = time.process_time()
    module = on_meta(config)
    layout = PLUGIN.layout(PLUGIN.architecture(config))
    assert time.process_time() - start < 30
    count = sum(parameter.numel() for parameter in module.parameters())
    if billions is not None:
        assert abs(count / 1e9 - billions) <= 0.005
        frozen = sum(p.numel() for p in PLUGIN.frozen_parameters(module))
        assert abs(frozen / 1e6 - 225.7) <= 0.1
    tensors = runtime_tensors(module)
    layout.check_runtime(tensors)
    rows = layout.table({key: tuple(tensor.shape) for key, tensor in tensors.items()})
    expected = released_names(config)
    assert {row.name: row.shape for row in rows} == expected
    assert (
        sum(
            torch.Size(row.shape).numel()
            for row in rows
            if not row.runtimes[0].endswith(("token_experts", "selection_bias"))
        )
        == count
    )
    assert all(layout.runtime_for(row.name) == row.runtimes for row in rows)
    fixed = {row.name.split(".", 2)[-1] for row in rows if row.dtype == "float32"}
    assert fixed == {
        "hc_head_fn", "hc_head_base", "hc_head_scale", "attn.attn_sink", "ffn.gate.bias",
        "attn.compressor.ape", "attn.indexer.compressor.ape",
        *(f"hc_{part}_{kind}" for part in ("attn", "ffn") for kind in ("fn", "base", "scale")),
    }  # fmt: skip
    assert layout.is_kept("mtp.0.e_proj.weight") and not layout.is_kept("layers.0.x")


def test_schedules() -> None:
    flash, pro = (PLUGIN.architecture(released(name)) for name in ("flash", "pro"))
    kinds = [layer.kind for layer in flash.layers]
    assert kinds[:6] == ["sliding", "sliding", "csa", "hca", "csa", "hca"] and kinds[-1] == "csa"
    assert [kinds.count(kind) for kind in ("sliding", "csa", "hca")] == [2, 21, 20]
    assert [layer.kind for layer in pro.layers[:4]] == ["hca", "hca", "csa", "hca"]
    assert flash.hash_layers == pro.hash_layers == (0, 1, 2)
    assert flash.main_rotary != flash.compress_rotary


@pytest.mark.parametrize(
    ("length", "gigaflop", "attention", "index"),
    [(4096, 84.3, 5.4, 0.6), (16384, 86.0, 6.6, 1.2), (131072, 94.7, 10.4, 6.1)],
)
def test_flops_of_flash(length: int, gigaflop: float, attention: float, index: float) -> None:
    """Forward and backward per token in GFLOP: three times the forward, the indexer's once. The
    stated figures have one decimal, so half of it is the tolerance."""
    architecture = PLUGIN.architecture(released("flash"))
    indexer = indexer_flops(architecture, [length]) / length / 1e9
    everything = PLUGIN.flops(architecture, [length]) / length / 1e9
    rows = sum(attended_rows(architecture, layer, length) for layer in architecture.layers)
    attended = 3 * 4 * 64 * 512 * rows / length / 1e9
    assert indexer == pytest.approx(index, abs=0.051)
    assert attended == pytest.approx(attention, abs=0.051)
    assert 3 * (everything - indexer) + indexer == pytest.approx(gigaflop, abs=0.051)


@pytest.mark.parametrize(("ratio", "limit"), [(4, None), (4, 2), (6, 1), (2, 3), (1, 1)])
def test_visible_entries_by_counting(ratio: int, limit: int | None) -> None:
    for length in range(30):
        counted = sum(min((t + 1) // ratio, limit or 99) for t in range(length))
        assert visible_entries(length, ratio, limit) == counted


def as_transformers_writes(config: dict[str, Any]) -> dict[str, Any]:
    from transformers import DeepseekV4Config

    dropped = ("model_type", "quantization_config")
    keys = {k: v for k, v in copy.deepcopy(config).items() if k not in dropped}
    written: dict[str, Any] = json.loads(DeepseekV4Config(**keys).to_json_string(use_diff=False))
    return written


@pytest.mark.parametrize("name", ["flash", "pro"])
def test_both_spellings_of_config_json(name: str) -> None:
    """transformers folds and drops the original keys; the architecture is the same, and an export
    has the keys again."""
    original = released(name)
    other = as_transformers_writes(original)
    assert "compress_ratios" not in other and "compress" in other["rope_parameters"]
    assert PLUGIN.architecture(other) == PLUGIN.architecture(original)
    architecture = PLUGIN.architecture(other)
    del other["qk_rope_head_dim"]  # not every version writes it
    exported = PLUGIN.export_config(other, architecture)
    for key in ("num_hash_layers", "qk_rope_head_dim", "topk_method", "scoring_func"):
        assert exported[key] == original[key], key
    assert exported["compress_ratios"] == original["compress_ratios"]
    for key in ("rope_theta", "compress_rope_theta"):
        assert exported[key] == original[key], key
    assert original["rope_scaling"].items() <= exported["rope_scaling"].items()


def test_export_keeps_the_original_config() -> None:
    original = released("flash")
    exported = PLUGIN.export_config(original, PLUGIN.architecture(original))
    dropped = {"quantization_config", "expert_dtype"}
    assert exported == {key: value for key, value in original.items() if key not in dropped}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("compress_ratios", None),
        ("compress_ratios", [0, 4]),
        ("compress_ratios", [16] * 44),
        ("layer_types", ["full_attention"] * 43),
        ("layer_types", [CSA] * 42),
        ("compress_ratios", [0] * 44),
        ("mlp_layer_types", ["moe"] * 2),
        ("mlp_layer_types", ["dense"] * 43),
        ("num_hash_layers", None),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "attention_factor": 1.2}),
        ("qk_rope_head_dim", 63),
        ("qk_rope_head_dim", None),
        ("index_head_dim", 32),
        ("o_groups", 7),
        ("num_key_value_heads", 2),
        ("n_shared_experts", 2),
        ("scoring_func", "sigmoid"),
        ("topk_method", "greedy"),
        ("norm_topk_prob", False),
        ("n_group", 8),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("vision_n_layers", 27),
        ("num_experts_per_tok", 257),
        ("swiglu_limit", "ten"),
        ("model_type", "deepseek_v41"),
    ],
)
def test_what_is_refused_is_named(key: str, value: object) -> None:
    config = {**released("flash"), key: value}
    if key == "compress_ratios" and value == [0] * 44:
        config["layer_types"] = [CSA] * 43
    expected = {"rope_scaling": "rope_type|attention_factor"}.get(key, key)
    with pytest.raises(ConfigError, match=expected):
        PLUGIN.architecture(config)
