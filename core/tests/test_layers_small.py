"""Causal convolution, adjacent-pair rotary, norms with their variants, row tables."""

import math

import pytest
import torch
from torch.nn import functional as F

from prime_rl.layers.causal_conv import causal_conv
from prime_rl.layers.norms import RMSNorm, rms_norm_late
from prime_rl.layers.rotary import Rotary, rotate_pairs
from prime_rl.layers.rotary_settings import RotarySettings
from prime_rl.layers.row_table import RowTable


def positions(*lengths: int) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


@pytest.mark.parametrize("dilation", [1, 3])
def test_convolution_equals_torch_for_each_document(dilation: int) -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = (1, 14, 3, 2)
    x = torch.randn(20, 6, generator=generator)
    weight, bias = torch.randn(6, 4, generator=generator), torch.randn(6, generator=generator)
    found = causal_conv(x, weight, positions(*lengths), bias, dilation)
    for part, mine in zip(x.split(lengths), found.split(lengths), strict=True):
        padded = F.pad(part.T, (3 * dilation, 0))
        expected = F.conv1d(padded[None], weight[:, None], bias, groups=6, dilation=dilation)
        torch.testing.assert_close(mine, expected[0].T)


def test_convolution_hides_broken_neighbours() -> None:
    """An inf in one document must not become NaN in the next."""
    x = torch.ones(4, 1)
    x[1] = torch.inf
    found = causal_conv(x, torch.tensor([[1.0, 2.0]]), positions(2, 2))
    assert found[2:, 0].tolist() == [2.0, 3.0]


def test_convolution_by_hand() -> None:
    """The last tap is the token itself."""
    found = causal_conv(
        torch.tensor([[1.0], [10.0], [100.0]]), torch.tensor([[3.0, 2.0]]), positions(3)
    )
    assert found[:, 0].tolist() == [2.0, 23.0, 230.0]


def test_adjacent_pairs_turn_by_their_angle() -> None:
    rotary = Rotary(RotarySettings((1.0, 0.5)))
    rotation = rotary.pairs(torch.tensor([0, 2]), torch.float32)
    x = torch.tensor([[1.0, 0.0, 0.0, 1.0]]).expand(2, 4)
    found = rotate_pairs(x, rotation)
    assert found[0].tolist() == [1.0, 0.0, 0.0, 1.0]
    expected = [math.cos(2), math.sin(2), -math.sin(1), math.cos(1)]
    assert found[1].tolist() == pytest.approx(expected, abs=1e-6)
    back = rotate_pairs(found[:, None].expand(2, 3, 4), rotation, inverse=True)
    torch.testing.assert_close(back, x[:, None].expand(2, 3, 4))


def test_rotation_is_computed_in_float32_for_float32_angles() -> None:
    rotation = Rotary(RotarySettings((1.0,))).pairs(torch.tensor([3]), torch.float32)
    x = torch.tensor([[1.0, 3.0]], dtype=torch.bfloat16)
    exact = rotate_pairs(x.float(), rotation)
    assert rotate_pairs(x, rotation).equal(exact.bfloat16())


def test_norm_variants() -> None:
    x = torch.tensor([[3.0, 4.0]])
    plain, centred = RMSNorm(2, 0.0), RMSNorm(2, 0.0, zero_centred=True)
    plain.weight.data = torch.tensor([2.0, 1.0])
    centred.weight.data = torch.tensor([1.0, 0.0])
    length = math.sqrt(12.5)
    expected = [6 / length, 4 / length]
    assert plain(x)[0].tolist() == pytest.approx(expected)
    assert centred(x)[0].tolist() == pytest.approx(expected)


def test_late_rounding_rounds_once() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=generator).bfloat16()
    weight = torch.randn(64, generator=generator).bfloat16()
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    late = RMSNorm(64, 1e-6, round_late=True)
    early = RMSNorm(64, 1e-6)
    late.weight.data, early.weight.data = weight, weight
    nearest = exact.bfloat16()
    off_late = (late(x) != nearest).float().mean()
    off_early = (early(x) != nearest).float().mean()
    assert off_late < 0.01 < 0.1 < off_early
    assert rms_norm_late(x, None, 1e-6).dtype == torch.bfloat16


def test_row_table_reads_rows_and_may_be_frozen() -> None:
    table = RowTable(5, 2, trainable=False)
    table.weight.data = torch.arange(10.0).view(5, 2)
    assert table(torch.tensor([[4], [0]])).tolist() == [[[8.0, 9.0]], [[0.0, 1.0]]]
    assert not table.weight.requires_grad and RowTable(1, 1).weight.requires_grad


def test_pairs_of_no_rows_turn() -> None:
    rotary = Rotary(RotarySettings((1.0, 0.1)))
    none = torch.zeros(0, dtype=torch.int64)
    assert rotate_pairs(torch.zeros(0, 4), rotary.pairs(none, torch.float32)).shape == (0, 4)


def test_row_table_in_host_memory_stays_there() -> None:
    with torch.device("meta"):
        table = RowTable(5, 2, on_cpu=True)
    table.to_empty(device="meta")
    assert table.weight.device.type == "cpu"
    table.weight.data = torch.arange(10.0).view(5, 2)
    table.to("meta", torch.bfloat16)
    assert table.weight.device.type == "cpu" and table.weight.dtype == torch.bfloat16
    assert table(torch.tensor([3])).tolist() == [[6.0, 7.0]]
