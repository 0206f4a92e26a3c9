"""Every installed weight transport delivers the same set of (name, shape, dtype, bits)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from prime_rl.api import NamedTensor
from prime_rl.plugins import scan
from prime_rl.testing.weight_transport import (
    WeightTransportConformance,
    awkward_tensors,
    differences,
)

TRANSPORTS = scan().names("weight_transport")


def kit(name: str) -> WeightTransportConformance:
    class Kit(WeightTransportConformance):
        plugin_name = name

    return Kit()


def model_tensors(dtype: torch.dtype) -> list[NamedTensor]:
    """A small model's state, views of fused weights among it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12), nn.LayerNorm(12), nn.Linear(12, 4, bias=False))
    fused = torch.randn(3 * 8, 8)
    parts = fused.split(8)
    tensors = [*model.state_dict().items(), *zip("qkv", parts, strict=True)]
    return [NamedTensor(f"model.{name}", tensor.to(dtype)) for name, tensor in tensors]


def test_there_is_a_transport() -> None:
    assert "filesystem" in TRANSPORTS


@pytest.mark.parametrize("name", TRANSPORTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ranks", [1, 2])
def test_delivered_is_sent(tmp_path: Path, name: str, dtype: torch.dtype, ranks: int) -> None:
    sent = model_tensors(dtype)
    for found in kit(name).transfer(1, tmp_path, sent, ranks):
        assert differences(dict(sent), found) == []


@pytest.mark.parametrize("name", TRANSPORTS)
def test_awkward_tensors_arrive_whole(tmp_path: Path, name: str) -> None:
    sent = awkward_tensors()
    for found in kit(name).transfer(4, tmp_path, sent):
        assert differences(dict(sent), found) == []


def test_the_comparison_sees_every_kind_of_difference() -> None:
    sent = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert differences(sent, dict(sent)) == []
    for found, word in (
        ({"a": torch.zeros(2)}, "missing"),
        ({**sent, "c": torch.ones(1)}, "was not sent"),
        ({**sent, "a": torch.zeros(1, 2)}, "shape"),
        ({**sent, "a": torch.zeros(2, dtype=torch.float64)}, "dtype"),
        ({**sent, "a": -torch.zeros(2)}, "bits"),
    ):
        assert word in differences(sent, found)[0]
