"""Our roundings beside vLLM's own CPU operators, on far more numbers than the stored recordings.

Needs `make test-vllm`, which unpacks the wheel and says where; skipped otherwise. With triton in the
environment, vLLM's GPU kernels are interpreted, too.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import record_vllm
import torch
import vllm_triton
from prime_rl_model_deepseek_v4.numerics import quantise_heads, quantise_index, quantise_plain
from prime_rl_model_deepseek_v4.rope import rotate_tail
from safetensors.torch import load_file
from torch import Tensor
from vllm_operators import Operators

from prime_rl.layers.float8 import Float8, quantise_groups
from prime_rl.layers.float8_weights import quantise_blocks
from prime_rl.layers.rotary import PairRotation

FOLDER = os.environ.get("PRIME_RL_VLLM")
pytestmark = pytest.mark.skipif(FOLDER is None, reason="`make test-vllm` runs these")


@pytest.fixture(scope="module")
def operators() -> Operators:
    assert FOLDER is not None
    return Operators(Path(FOLDER).resolve())


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes_of(quantised: Float8) -> Tensor:
    return quantised.codes.view(torch.uint8)


def test_recordings_are_what_the_operators_make(operators: Operators) -> None:
    for path, made in (
        (record_vllm.CORE, record_vllm.record_weights(operators)),
        (record_vllm.DEEPSEEK, record_vllm.record_deepseek(operators)),
    ):
        stored = load_file(path)
        assert stored.keys() == made.keys()
        for name, tensor in made.items():
            if name == "angles":
                torch.testing.assert_close(tensor, stored[name])
            elif name != "index_scores":
                assert tensor.contiguous().view(torch.uint8).equal(stored[name].view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_million_weights(operators: Operators, dtype: torch.dtype) -> None:
    weight = (normal(1024, 1000, seed=0) * 0.02).to(dtype)
    for policy in ("exact", "power_of_two"):
        codes, scales = operators.block_cast(weight, policy == "power_of_two")
        found = quantise_blocks(weight, policy)  # type: ignore[arg-type]
        assert codes_of(found).equal(codes.view(torch.uint8))
        assert found.scales.equal(scales)


def test_a_thousand_cache_rows(operators: Operators) -> None:
    """Rows of every magnitude; the CPU operator's two peculiarities are repeated here."""
    powers = torch.randint(-14, 7, (1000, 1), generator=torch.Generator().manual_seed(1))
    kv = (normal(1000, 512, seed=1) * torch.exp2(powers.float())).bfloat16()
    positions = torch.arange(1000) * 3
    table = record_vllm.angles(3000)
    rows = operators.local_rows(kv, positions, table)
    turned = rotate_tail(kv, PairRotation(*table[positions].chunk(2, dim=1)))
    rotated = rows[:, 448:576].contiguous().view(torch.bfloat16)
    # One number of 64,000 differs: where the two products nearly cancel, fusing them shows.
    assert turned[:, 448:].ne(rotated).sum() <= 5
    theirs = quantise_groups(kv[:, :448], 64, power_of_two=True, scale_floor=1e-4)
    assert (theirs.scales.view(torch.int32) >> 23).equal(rows[:, 576:583].int())
    powers = theirs.scales.repeat_interleave(64, dim=1)
    kept = (kv[:, :448].float() / powers).abs() >= 2.0**-6
    assert codes_of(theirs)[kept].equal(rows[:, :448][kept])
    assert (rows[:, :448][~kept] & 0x7F == 0).all()
    ours = quantise_plain(turned[:, :448])
    is_same = ours.scales == theirs.scales
    assert is_same.float().mean() > 0.5
    wide = is_same.repeat_interleave(64, dim=1)
    assert codes_of(ours)[wide].equal(codes_of(theirs)[wide])


def test_half_a_million_index_codes(operators: Operators) -> None:
    positions = torch.arange(64) * 11
    table = record_vllm.angles(704)
    q_TJI, w_TJ = normal(64, 64, 128, seed=2).bfloat16(), normal(64, 64, seed=3).bfloat16()
    codes, weights = operators.indexer_query(q_TJI, w_TJ, positions, table)
    turned = rotate_tail(q_TJI, PairRotation(*table[positions].chunk(2, dim=1)))
    query, _, scaled = quantise_index(turned, q_TJI[0], w_TJ)
    assert codes_of(quantise_heads(turned)).equal(codes.view(torch.uint8))
    assert query.equal(codes.float())
    assert scaled.equal(weights)


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_interpreted_kernels_make_the_recordings_of_the_gpu(tmp_path: Path) -> None:
    assert FOLDER is not None
    script = Path(vllm_triton.__file__)
    command = [sys.executable, str(script), str(Path(FOLDER).resolve()), str(tmp_path)]
    subprocess.run(command, check=True, env={**os.environ, "TRITON_INTERPRET": "1"})
    for owner, path in vllm_triton.STORED.items():
        stored, made = load_file(path), load_file(tmp_path / f"{owner}.safetensors")
        assert stored.keys() == made.keys()
        for name, tensor in made.items():
            assert tensor.view(torch.uint8).equal(stored[name].view(torch.uint8)), name
