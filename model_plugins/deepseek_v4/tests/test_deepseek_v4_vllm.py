"""Cache rows, queries and indexer numbers against bytes that vLLM 0.31's CPU operators made.

`tests/record_vllm.py` recorded them and states the inputs, which are made here again. Two things
that only the CPU operator of local and compressed rows does are not ours: a scale is at least 2^-13
(it clamps amax / 448 at 1e-4, CUDA clamps amax), and what is below 2^-6 of its scale
becomes 0.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from prime_rl_model_deepseek_v4.compressor import Compressor
from prime_rl_model_deepseek_v4.grouped import GroupedLinear
from prime_rl_model_deepseek_v4.numerics import (
    quantise_heads,
    quantise_index,
    quantise_plain,
    round_rows,
)
from prime_rl_model_deepseek_v4.places import Entries
from prime_rl_model_deepseek_v4.rope import rotate_tail
from safetensors.torch import load_file
from torch import Tensor

from prime_rl.layers.float8 import Float8, quantise_groups
from prime_rl.layers.norms import rms_norm_late
from prime_rl.layers.rotary import PairRotation
from prime_rl.testing.fixed_numbers import fixed_numbers

ROWS, HEADS = 6, 3
POSITIONS = torch.arange(ROWS) * 7
EXPONENTS = torch.tensor([0, -14, -3, 2, 5, -6])


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(Path(__file__).parent / "data" / "vllm_cache.safetensors")


def rotation_at(recorded: dict[str, Tensor], positions: Tensor) -> PairRotation:
    cos, sin = recorded["angles"][positions].chunk(2, dim=1)
    return PairRotation(cos, sin)


def scale_bytes(quantised: Float8) -> Tensor:
    return (quantised.scales.view(torch.int32) >> 23).to(torch.uint8)


def codes_of(quantised: Float8) -> Tensor:
    return quantised.codes.view(torch.uint8)


def check_plain_numbers(plain: Tensor, rows: Tensor, has_small: bool) -> None:
    """All codes and scales, first with the CPU operator's two peculiarities, then ours without."""
    codes, scales = rows[:, :448], rows[:, 576:583]
    theirs = quantise_groups(plain.bfloat16(), 64, power_of_two=True, scale_floor=1e-4)
    assert scale_bytes(theirs).equal(scales)
    wide = theirs.scales.repeat_interleave(64, dim=1)
    flushed = (plain.bfloat16().float() / wide).abs() < 2.0**-6
    # Flushing keeps the sign of a number that was not zero.
    expected = torch.where(flushed, codes_of(theirs) & 0x80, codes_of(theirs))
    assert expected.equal(codes & torch.where(flushed, 0x80, 0xFF).to(torch.uint8))
    assert (codes[flushed] & 0x7F == 0).all()
    ours = quantise_plain(plain)
    is_low = plain.bfloat16().float().unflatten(1, (7, 64)).abs().amax(-1) < 448e-4
    assert scale_bytes(ours)[~is_low].equal(scales[~is_low])
    compared = ~is_low.repeat_interleave(64, dim=1) & (ours.codes.float().abs() > 2.0**-6)
    assert codes_of(ours)[compared].equal(codes[compared])
    assert is_low.any() == has_small
    assert compared.float().mean() > 0.5


def test_local_rows(recorded: dict[str, Tensor]) -> None:
    kv = (fixed_numbers(ROWS, 512, seed=2) * torch.exp2(EXPONENTS.float())[:, None]).bfloat16()
    rows = recorded["local_rows"]
    turned = rotate_tail(kv, rotation_at(recorded, POSITIONS))
    check_plain_numbers(turned[:, :448], rows, has_small=True)
    rotated = rows[:, 448:576].contiguous().view(torch.bfloat16)
    assert turned[:, 448:].equal(rotated)
    # What attention reads: the codes times their scales, and the rotated numbers as they are.
    read = round_rows(turned, 64)
    assert read[:, 448:].equal(rotated)
    powers = torch.exp2(rows[:, 576:583].float() - 127).repeat_interleave(64, dim=1)
    values = rows[:, :448].contiguous().view(torch.float8_e4m3fn).float() * powers
    ordinary = values.ne(0) & (powers > 2.0**-13)
    assert read[:, :448].float()[ordinary].equal(values[ordinary])


def test_queries(recorded: dict[str, Tensor]) -> None:
    """Norm and rope in float32 with one rounding; another order of the sum of squares may turn a
    last bit."""
    q_THD = fixed_numbers(ROWS, HEADS, 512, seed=3).bfloat16()
    normal = rms_norm_late(q_THD.float(), None, 1e-6)
    found = rotate_tail(normal, rotation_at(recorded, POSITIONS)).bfloat16()
    differing = found.ne(recorded["queries"])
    assert differing.sum() <= 2
    steps = found.view(torch.int16).int() - recorded["queries"].view(torch.int16).int()
    assert steps.abs().max() <= 1


@pytest.fixture(scope="module")
def on_gpu() -> dict[str, Tensor]:
    """What vLLM's Triton kernels made on an H200 (`tests/vllm_triton.py`)."""
    return load_file(Path(__file__).parent / "data" / "vllm_gpu.safetensors")


def scaled(*shape: int, seed: int) -> Tensor:
    powers = torch.exp2(EXPONENTS.float()).view(-1, *[1] * (len(shape) - 1))
    return (fixed_numbers(*shape, seed=seed) * powers).bfloat16()


def test_rows_of_the_gpu_kernel(on_gpu: dict[str, Tensor]) -> None:
    """All bytes, with none of the CPU operator's peculiarities."""
    x, rows = scaled(ROWS, 512, seed=13), on_gpu["rows"]
    quantised = quantise_plain(x[:, :448])
    assert codes_of(quantised).equal(rows[:, :448])
    assert scale_bytes(quantised).equal(rows[:, 576:583])
    read = round_rows(x, 64)
    assert read[:, 448:].equal(rows[:, 448:576].contiguous().view(torch.bfloat16))
    powers = quantised.scales.repeat_interleave(64, dim=1)
    assert read[:, :448].float().equal(quantised.codes.float() * powers)


def test_inputs_of_the_grouped_projection(on_gpu: dict[str, Tensor]) -> None:
    """All bytes: bfloat16 output of attention, turned back in float32, rounded once. The layer
    with an identity for its weight gives out what it multiplies."""
    turned = rotate_tail(
        scaled(ROWS, 2, 512, seed=12).float(), rotation_at(on_gpu, POSITIONS), inverse=True
    )
    part = GroupedLinear(1, 1024, 1024, "power_of_two")
    part.weight.data = torch.eye(1024)
    wide = on_gpu["grouped.scales"].repeat_interleave(128, dim=1)
    assert part(turned).equal(on_gpu["grouped.codes"].float() * wide)


def compressed(
    recorded: dict[str, Tensor], size: int, ratio: int, tokens: int, dtype: torch.dtype
) -> Tensor:
    """Entries of one document whose projections are the fixed numbers: x is [key | gate] and the
    projection takes it as it is."""
    width = size * (2 if ratio == 4 else 1)
    part = Compressor(2 * width, size, ratio, overlap=ratio == 4, eps=1e-6)
    with torch.no_grad():
        part.project.weight.copy_(torch.eye(2 * width))
        part.position_bias.bias.copy_(fixed_numbers(ratio, width, seed=6))
        part.norm.weight.copy_(1 + fixed_numbers(size, seed=7) / 8)
    key, gate = (fixed_numbers(tokens, width, seed=seed) for seed in (4, 5))
    count = tokens // ratio
    number = torch.arange(count)
    nothing = torch.empty(0, dtype=torch.int64)
    entries = Entries(
        tokens_CM=number[:, None] * ratio + torch.arange(ratio),
        is_first_C=number == 0,
        first_T=nothing,
        last_T=nothing,
        most=count,
        rotation=rotation_at(recorded, number * ratio),
        all_rows_TN=nothing,
    )
    with torch.no_grad():
        return part(torch.cat((key, gate), dim=1).to(dtype), entries)


@pytest.mark.parametrize(("name", "ratio", "tokens"), [("csa_rows", 4, 16), ("hca_rows", 128, 128)])
def test_compressed_rows(recorded: dict[str, Tensor], name: str, ratio: int, tokens: int) -> None:
    """bfloat16 inputs, float32 from the product to the last rounding."""
    entries = compressed(recorded, 512, ratio, tokens, torch.bfloat16)
    rows = recorded[name]
    assert entries.dtype == torch.bfloat16
    check_plain_numbers(entries[:, :448], rows, has_small=False)
    assert entries[:, 448:].equal(rows[:, 448:576].contiguous().view(torch.bfloat16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys(recorded: dict[str, Tensor], dtype: torch.dtype) -> None:
    """All bytes: this operator has neither peculiarity. Keys pass bfloat16 in a float32 run, too."""
    quantised = quantise_heads(compressed(recorded, 128, 4, 24, dtype))
    rows = recorded["index_rows"]
    assert codes_of(quantised).equal(rows[:, :128])
    assert quantised.scales[:, 0].equal(rows[:, 128:].contiguous().view(torch.float32)[:, 0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_queries_weights_and_scores(recorded: dict[str, Tensor], dtype: torch.dtype) -> None:
    q_TJI = fixed_numbers(ROWS, HEADS, 128, seed=8).to(dtype)
    turned = rotate_tail(q_TJI, rotation_at(recorded, POSITIONS))
    keys = compressed(recorded, 128, 4, 24, dtype)
    query, key, weights = quantise_index(turned, keys, fixed_numbers(ROWS, HEADS, seed=9))
    assert query.equal(recorded["index_codes"].float())
    assert weights.equal(recorded["index_weights"])
    scores = (torch.einsum("tji,ci->tjc", query, key).relu() * weights[..., None]).sum(1)
    torch.testing.assert_close(scores, recorded["index_scores"], rtol=1e-5, atol=1e-6)
