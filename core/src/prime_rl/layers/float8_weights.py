"""Weights in 8-bit blocks: the casts that servers do, and unbiased rounding to their grid.

R rows, C columns; leading dimensions (experts) are free. Blocks at the edges may be smaller.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl.layers.float8 import (
    FLOAT8_MAX,
    Float8,
    float8_codes,
    power_of_two_ceil,
    straight_through,
)

WeightScales = Literal["exact", "power_of_two", "two_step"]
"""exact: s = amax / 448. power_of_two: that, rounded up to a power of two. two_step: exact first,
then the result once more with powers of two, which rounds twice."""

WEIGHT_BLOCK = 128
"""Rows and columns that share a scale."""
AMAX_FLOOR = 1e-4
"""A block's largest magnitude counts as at least this."""


def quantise_blocks(weight: Tensor, scales: WeightScales, block: int = WEIGHT_BLOCK) -> Float8:
    """Codes of the weight's shape [..., R, C] and scales [..., ceil(R/block), ceil(C/block)]."""
    first = _cast(weight, scales == "power_of_two", block)
    if scales != "two_step":
        return first
    return _cast(dequantise_blocks(first, block), True, block)


def dequantise_blocks(quantised: Float8, block: int = WEIGHT_BLOCK) -> Tensor:
    """float32 [..., R, C] = q s."""
    codes, scales = quantised
    values = _blocked(codes.float(), block) * scales[..., :, None, :, None]
    return _flat(values, codes.shape)


def round_blocks(
    weight: Tensor,
    scales: WeightScales,
    block: int = WEIGHT_BLOCK,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What a server multiplies with, in `dtype` (the weight's by default); straight-through.

    bfloat16 and wider types hold it exactly unless scales are "exact".
    """
    with torch.no_grad():
        values = dequantise_blocks(quantise_blocks(weight, scales, block), block)
        values = values.to(dtype or weight.dtype)
    return straight_through(weight, values)


@torch.no_grad()
def round_blocks_stochastically(
    weight: Tensor, generator: torch.Generator, block: int = WEIGHT_BLOCK
) -> Tensor:
    """Each weight moves to one of its two neighbours on the 8-bit grid with power-of-two scales,
    to the far one with a probability that is its fraction of the distance: float32 [..., R, C].

    The mean over many draws is the weight. Weights on the grid stay, so rounding is idempotent; a
    later cast to nearest with power-of-two scales restores the result exactly. Draw before any
    other rounding: what bfloat16 dropped cannot come back. `generator` lives on weight's device.
    """
    blocked = _blocked(weight.float(), block)
    scales = power_of_two_ceil(_scales(blocked))[..., :, None, :, None]
    scaled = blocked / scales
    magnitude = scaled.abs()
    steps = _steps(magnitude)
    in_steps = magnitude / steps
    below = in_steps.floor()
    draw = torch.rand(in_steps.shape, generator=generator, device=weight.device)
    chosen = (below + (draw < in_steps - below)) * steps
    return _flat(chosen.copysign(scaled) * scales, weight.shape)


def _cast(weight: Tensor, power_of_two: bool, block: int) -> Float8:
    """Multiplies by the reciprocal of the scale: dividing gives other codes now and then."""
    blocked = _blocked(weight.float(), block)
    scales = _scales(blocked)
    if power_of_two:
        scales = power_of_two_ceil(scales)
    codes = float8_codes(blocked * (1.0 / scales)[..., :, None, :, None])
    return Float8(_flat(codes, weight.shape), scales)


def _scales(blocked: Tensor) -> Tensor:
    """Exact scales of [..., R/B, B, C/B, B]: [..., R/B, C/B]."""
    amax = blocked.abs().amax(dim=(-3, -1)).clamp(min=AMAX_FLOOR)
    # By a tensor: CUDA multiplies by the reciprocal of a number, which turns last bits.
    return amax / torch.full_like(amax, FLOAT8_MAX)


def _steps(magnitude: Tensor) -> Tensor:
    """Distance of the e4m3 numbers around each magnitude: an eighth of its power of two, at least
    2^-9 (subnormal numbers)."""
    power = (magnitude.clamp(min=2.0**-6).view(torch.int32) & 0x7F800000).view(torch.float32)
    return power * 0.125


def _blocked(x: Tensor, block: int) -> Tensor:
    """[..., R/B, B, C/B, B], filled up with zeros."""
    rows, columns = -x.shape[-2] % block, -x.shape[-1] % block
    if rows or columns:
        x = F.pad(x, (0, columns, 0, rows))
    return x.unflatten(-1, (-1, block)).unflatten(-3, (-1, block))


def _flat(blocked: Tensor, shape: torch.Size) -> Tensor:
    whole = blocked.flatten(-4, -3).flatten(-2)
    return whole[..., : shape[-2], : shape[-1]].contiguous()
