"""Records what vLLM's CPU operators make of fixed numbers, for tests that run without vLLM.

    python tests/record_vllm.py FOLDER     (a vLLM wheel, unpacked; `make test-vllm` has one)

Inputs are `fixed_numbers` of the shapes and seeds below, so only outputs are stored.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm_operators import Operators

from prime_rl.testing.fixed_numbers import fixed_numbers

ROOT = Path(__file__).resolve().parents[1]
CORE = ROOT / "core" / "tests" / "data" / "vllm_block_cast.safetensors"
DEEPSEEK = ROOT / "model_plugins" / "deepseek_v4" / "tests" / "data" / "vllm_cache.safetensors"

ROWS = 6
"""Local cache rows and queries."""
EXPONENTS = torch.tensor([0, -14, -3, 2, 5, -6])
"""Powers of two that rows are multiplied with: some have subnormal codes, one lies below the
scale that the CPU operator starts at."""
HEADS = 3
"""Heads of recorded queries."""


def angles(positions: int) -> Tensor:
    """Cosines, then sines, of the positions [P, 64]; theta 10000. Stored, since libraries differ."""
    frequencies = 10000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    turns = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((turns.cos(), turns.sin()), dim=1).float()


def record_weights(operators: Operators) -> dict[str, Tensor]:
    """Block casts of two bfloat16 matrices with a partial block on every edge."""
    made = {}
    for name, shape in {"tall": (132, 20), "wide": (20, 132)}.items():
        weight = (fixed_numbers(*shape, seed=1) / 64).bfloat16()
        codes, scales = operators.block_cast(weight, power_of_two=False)
        made |= {f"{name}.exact.codes": codes, f"{name}.exact.scales": scales}
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        restored = codes.float() * wide[: shape[0], : shape[1]]
        for policy, source in (("power_of_two", weight), ("two_step", restored)):
            codes, scales = operators.block_cast(source, power_of_two=True)
            made |= {f"{name}.{policy}.codes": codes, f"{name}.{policy}.scales": scales}
    return made


def record_deepseek(operators: Operators) -> dict[str, Tensor]:
    """Rows of the key cache, queries, compressed entries, indexer codes and scores."""
    table = angles(36)
    positions = torch.arange(ROWS) * 7
    kv = (fixed_numbers(ROWS, 512, seed=2) * torch.exp2(EXPONENTS.float())[:, None]).bfloat16()
    made = {
        "angles": table,
        "local_rows": operators.local_rows(kv, positions, table),
        "queries": operators.queries(
            fixed_numbers(ROWS, HEADS, 512, seed=3).bfloat16(), positions, table
        ),
    }
    for name, (size, ratio, tokens) in {
        "csa_rows": (512, 4, 16),
        "hca_rows": (512, 128, 128),
        "index_rows": (128, 4, 24),
    }.items():
        width = size * (2 if ratio == 4 else 1)
        made[name] = operators.entry_rows(
            fixed_numbers(tokens, width, seed=4),
            fixed_numbers(tokens, width, seed=5),
            fixed_numbers(ratio, width, seed=6),
            1 + fixed_numbers(size, seed=7) / 8,
            table,
        )
    codes, weights = operators.indexer_query(
        fixed_numbers(ROWS, HEADS, 128, seed=8).bfloat16(),
        fixed_numbers(ROWS, HEADS, seed=9).bfloat16(),
        positions,
        table,
    )
    made |= {"index_codes": codes, "index_weights": weights}
    made["index_scores"] = operators.indexer_scores(codes, weights, made["index_rows"])
    return made


def main(folder: Path) -> None:
    operators = Operators(folder)
    for path, made in ((CORE, record_weights(operators)), (DEEPSEEK, record_deepseek(operators))):
        path.parent.mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in made.items()}, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
