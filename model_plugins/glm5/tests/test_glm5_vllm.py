"""Cache rows, indexer numbers and rope against bytes that vLLM 0.31's kernels made on an H200.

`tests/vllm_triton.py` recorded them and states the inputs, which are made here again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from prime_rl_model_glm5.attention import _rotate
from prime_rl_model_glm5.numerics import (
    quantise_heads,
    quantise_index,
    quantise_latents,
    round_latents,
)
from safetensors.torch import load_file
from torch import Tensor

from prime_rl.layers.norms import rms_norm_late
from prime_rl.layers.rotary import PairRotation, rotate_pairs
from prime_rl.testing.fixed_numbers import fixed_numbers

ROWS = 6
POSITIONS = torch.arange(ROWS) * 7
EXPONENTS = torch.tensor([0, -14, -3, 2, 5, -6])


@pytest.fixture(scope="module")
def recorded() -> dict[str, Tensor]:
    return load_file(Path(__file__).parent / "data" / "vllm_gpu.safetensors")


@pytest.fixture
def rotation(recorded: dict[str, Tensor]) -> PairRotation:
    """Angles in bfloat16, as the server's table has them."""
    return PairRotation(*recorded["angles"][POSITIONS].chunk(2, dim=1))


def scaled(*shape: int, seed: int) -> Tensor:
    powers = torch.exp2(EXPONENTS.float()).view(-1, *[1] * (len(shape) - 1))
    return (fixed_numbers(*shape, seed=seed) * powers).bfloat16()


def turned(x: Tensor, rotation: PairRotation) -> Tensor:
    return torch.cat((rotate_pairs(x[..., :64], rotation), x[..., 64:]), dim=-1)


def index_keys(rotation: PairRotation) -> Tensor:
    weight, bias = 1 + fixed_numbers(128, seed=6) / 8, fixed_numbers(128, seed=7) / 8
    normal = F.layer_norm(scaled(ROWS, 128, seed=5).float(), (128,), weight, bias, 1e-6)
    return turned(normal, rotation)


def test_cached_latents(recorded: dict[str, Tensor]) -> None:
    """All codes and scales; the row of tiny latents has normalised ones that are not tiny."""
    weight = (1 + fixed_numbers(512, seed=3) / 8).bfloat16()
    normal = rms_norm_late(scaled(ROWS, 512, seed=2).float(), weight, 1e-5)
    quantised = quantise_latents(normal)
    rows = recorded["latent_rows"]
    assert quantised.codes.view(torch.uint8).equal(rows[:, :512])
    assert quantised.scales.equal(rows[:, 512:528].contiguous().view(torch.float32))
    wide = quantised.scales.repeat_interleave(128, dim=1)
    assert round_latents(normal).equal(quantised.codes.float() * wide)


def test_rotated_keys_and_queries(recorded: dict[str, Tensor], rotation: PairRotation) -> None:
    """bfloat16 numbers turned in float32 with one rounding."""
    keys = recorded["latent_rows"][:, 528:].contiguous().view(torch.bfloat16)
    assert _rotate(scaled(ROWS, 64, seed=4), rotation).equal(keys)
    assert _rotate(scaled(ROWS, 2, 64, seed=8), rotation).equal(recorded["rotated_queries"])


def test_index_keys(recorded: dict[str, Tensor], rotation: PairRotation) -> None:
    quantised = quantise_heads(index_keys(rotation))
    rows = recorded["index_rows"]
    assert quantised.codes.view(torch.uint8).equal(rows[:, :128])
    assert quantised.scales.equal(rows[:, 128:].contiguous().view(torch.float32))


def test_index_queries_and_weights(recorded: dict[str, Tensor], rotation: PairRotation) -> None:
    query = turned(scaled(ROWS, 3, 128, seed=9).float(), rotation)
    codes, _, weights = quantise_index(query, index_keys(rotation), fixed_numbers(ROWS, 3, seed=10))
    assert codes.equal(recorded["index_codes"].float())
    assert weights.equal(recorded["index_weights"])
