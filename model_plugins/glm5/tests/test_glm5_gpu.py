"""GLM-5 on an accelerator: the same numbers as on the CPU, and bfloat16 both ways."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from prime_rl.api import PackedBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def gradients(module: torch.nn.Module, documents: list[list[int]], device: str) -> dict[str, Any]:
    """Hidden states and gradients of a fixed projection of them, float32 on the CPU."""
    hidden = module(PackedBatch.from_documents(documents, device))
    upstream = torch.linspace(-1, 1, hidden.numel()).sin().view_as(hidden)
    hidden.float().backward(upstream.to(device))
    named = {n: p.grad.float().cpu() for n, p in module.named_parameters() if p.grad is not None}
    return {**named, "hidden": hidden.detach().float().cpu()}


def test_float32_equals_the_cpu(checkpoint: Path, make_ours: Any, documents: Any) -> None:
    expected = gradients(make_ours(checkpoint)[1], documents, "cpu")
    found = gradients(make_ours(checkpoint)[1].cuda(), documents, "cuda")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-4 * tensor.abs().max(), name


def test_bfloat16_trains(checkpoint: Path, make_ours: Any, documents: Any) -> None:
    """Half the rows within 10 % of float32: in the others another key or expert was chosen."""
    expected = gradients(make_ours(checkpoint)[1], documents, "cpu")
    found = gradients(make_ours(checkpoint, torch.bfloat16)[1].cuda(), documents, "cuda")
    assert found.keys() == expected.keys()
    assert all(tensor.isfinite().all() for tensor in found.values())
    error = (found["hidden"] - expected["hidden"]).norm(dim=-1)
    assert (error / expected["hidden"].norm(dim=-1)).median() <= 0.1
