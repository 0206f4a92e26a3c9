"""The released sizes: construction, counts, names, hash constants, operations."""

import time
from functools import cache
from math import prod
from typing import Any

import qwen3_8_cases as cases
import qwen3_8_released as released
import torch
from prime_rl_model_qwen3_8 import Qwen38

from prime_rl.api.layout import WeightLayout
from prime_rl.models.load import runtime_tensors

MODEL = Qwen38(Qwen38.Config(type="qwen3_8"))


@cache
def built() -> tuple[Any, torch.nn.Module, float]:
    """Architecture, module on the meta device, seconds it took."""
    started = time.perf_counter()
    architecture = MODEL.architecture(released.CONFIG)
    with torch.device("meta"):
        module = MODEL.build(architecture, cases.kernels(architecture.num_layers))
    return architecture, module, time.perf_counter() - started


@cache
def layout() -> WeightLayout:
    """Of the released architecture."""
    return MODEL.layout(built()[0])


def test_builds_on_the_meta_device() -> None:
    """Backbone 125.74 B and table 51.20 B; 36 DeltaNet and 12 sparse layers."""
    architecture, module, seconds = built()
    assert seconds < 30
    assert architecture.sparse_layers == tuple(range(3, 48, 4))
    assert len(architecture.delta_layers) == 36
    table = module.ngrams[0].table.weight.numel()
    total = sum(parameter.numel() for parameter in module.parameters())
    assert table == released.TABLE == 51_200_245_760
    assert abs(total - table - released.BACKBONE) < 5_000_000
    assert total - table == sum(
        prod(shape)
        for name, shape in released.tensors().items()
        if "shard_" not in name and not name.endswith(("multipliers", "sizes", "offsets"))
    )


def test_every_released_name_has_its_place() -> None:
    """Names and shapes, both ways; also without `language_model.`."""
    tensors = runtime_tensors(built()[1])
    layout().check_runtime(tensors)
    rows = layout().table({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    assert {row.name: row.shape for row in rows} == released.tensors()
    for row in rows:
        assert layout().runtime_for(row.name) == row.runtimes
        other = row.name.replace("model.language_model.", "model.")
        assert layout().runtime_for(other) == row.runtimes
    layout().choose(released.tensors())
    assert layout().is_kept("model.visual.blocks.0.attn.qkv.weight")
    assert layout().is_kept("mtp.layers.0.mlp.experts.gate_up_proj")
    ple = "model.language_model.layers.1.ple.ple_embedding."
    for name in ("hashstats_rows", "token_lookup"):
        assert layout().is_ignored(ple + name) and not layout().is_kept(ple + name)


def test_fp8_release_has_its_place() -> None:
    """Experts one by one with block scales, the table with one number for all of its parts."""
    names = [name for name in released.tensors() if ".experts." not in name]
    prefix = "model.language_model.layers."
    for layer in range(48):
        for expert in range(512):
            for kind in ("gate", "up", "down"):
                weight = f"{prefix}{layer}.mlp.experts.{expert}.{kind}_proj.weight"
                names += [weight, weight + "_scale_inv"]
    names.append(f"{prefix}1.ple.ple_embedding.ngram_embedding.weight_scale")
    forms = layout().choose(dict.fromkeys(names))
    assert len(list(forms["layers.7.mlp.experts.gate_up"].leaves())) == 1024


def test_hash_constants() -> None:
    (table,) = built()[0].tables
    assert table.multipliers == (23703573157769, 20109073645365, 8052911324071)
    ends = (3, 23, 33, 47, 59, 63, 69, 77, 81, 93, 107, 147, 153, 159, 161, 171)
    assert table.sizes == tuple(20_000_000 + end for end in ends)
    assert sum(table.sizes) == 320_001_446 and table.rows == 320_001_536
    assert table.offsets[:3] == (0, 20_000_003, 40_000_026)
    assert table.part_sizes == (2_500_012,) * 128
    assert table.layer == 1 and table.eos_token == 248044 and table.width == 2560


def test_operations_of_the_released_sizes() -> None:
    """13.3 GFLOP per token in matrix products, to the digits given; the rest by its formulas."""
    architecture = built()[0]
    core = 36 * 8 * 48 * 128 * 128
    alone = MODEL.flops(architecture, [1])
    reading = 12 * 4 * 24 * 256 * 1  # the first token reads itself, sees no block
    assert abs(alone - core - reading - 13.3e9) <= 0.05e9
    length = 5000
    blocks = [(t + 1) // 4 for t in range(length)]
    read = [4 * min(512, n) + (t + 1) % 4 for t, n in enumerate(blocks)]
    assert read[:2051] == list(range(1, 2052)) and read[2051:2056] == [2048, 2049, 2050, 2051, 2048]
    assert max(read) * 4 * 24 * 256 <= 50.5e6
    expected = length * (alone - reading)
    expected += 12 * (4 * 24 * 256 * sum(read) + 2 * 4 * 128 * sum(blocks))
    assert MODEL.flops(architecture, [length]) == expected
    for short in (1, 3, 4, 2047, 2048, 2049, 2052):
        read_short = 4 * 24 * 256 * sum(read[:short]) + 2 * 4 * 128 * sum(blocks[:short])
        assert MODEL.flops(architecture, [short]) == short * (alone - reading) + 12 * read_short
