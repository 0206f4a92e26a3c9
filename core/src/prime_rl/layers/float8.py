"""8-bit floats (e4m3) as servers use them: rounding, scales, and rounding that gradients pass.

A number x is kept as a code q and a scale s, x ~ q s; neighbours share a scale: groups of the last
dimension (activations, cache rows) or square blocks of a matrix (weights, `float8_weights`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

FLOAT8_MAX = 448.0
"""Largest e4m3 number."""
ACTIVATION_GROUP = 128
"""Inputs of a linear layer that share a scale."""

_EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF


class Float8(NamedTuple):
    """Codes (float8_e4m3fn) and their float32 scales."""

    codes: Tensor
    scales: Tensor


def power_of_two_ceil(x: Tensor) -> Tensor:
    """The smallest power of two that is not below x; float32, x > 0 and normal.

    By the bits, because a logarithm may land on the wrong side of a whole number.
    """
    bits = x.view(torch.int32)
    up = (bits & _MANTISSA).ne(0).to(torch.int32) << 23
    return ((bits & _EXPONENT) + up).view(torch.float32)


def float8_codes(x: Tensor) -> Tensor:
    """Nearest e4m3 number, ties to even, subnormal ones included; beyond 448 it is 448."""
    return x.float().clamp(-FLOAT8_MAX, FLOAT8_MAX).to(torch.float8_e4m3fn)


def quantise_groups(
    x: Tensor,
    size: int,
    *,
    power_of_two: bool,
    amax_floor: float = 0.0,
    scale_floor: float = 0.0,
) -> Float8:
    """Codes of x's shape [..., D] and scales [..., ceil(D / size)].

    s = max(max(amax, amax_floor) / 448, scale_floor) for the largest magnitude of a group, rounded
    up to a power of two if asked; q = x / s. The last group may be shorter.
    """
    grouped = _grouped(x.float(), size)
    amax = grouped.abs().amax(-1, keepdim=True).clamp(min=amax_floor)
    scales = (amax * (1 / FLOAT8_MAX)).clamp(min=scale_floor)
    if power_of_two:
        scales = power_of_two_ceil(scales)
    codes = float8_codes(grouped / scales).flatten(-2)[..., : x.shape[-1]]
    return Float8(codes, scales.squeeze(-1))


def dequantise_groups(quantised: Float8, size: int) -> Tensor:
    """float32 values q s of what `quantise_groups` made."""
    grouped = _grouped(quantised.codes.float(), size)
    values = grouped * quantised.scales[..., None]
    return values.flatten(-2)[..., : quantised.codes.shape[-1]]


def straight_through(x: Tensor, values: Tensor) -> Tensor:
    """`values`, with the gradient going to x as if they were x; both of one shape."""
    result: Tensor = _StraightThrough.apply(x, values)
    return result


def round_groups(
    x: Tensor,
    size: int,
    *,
    power_of_two: bool,
    amax_floor: float = 0.0,
    scale_floor: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What a reader of the groups gets, q s, in `dtype` (x's by default); straight-through.

    bfloat16 and wider types hold q s exactly when scales are powers of two.
    """
    with torch.no_grad():
        quantised = quantise_groups(
            x, size, power_of_two=power_of_two, amax_floor=amax_floor, scale_floor=scale_floor
        )
        values = dequantise_groups(quantised, size).to(dtype or x.dtype)
    return straight_through(x, values)


def round_activations(x: Tensor, power_of_two: bool, dtype: torch.dtype | None = None) -> Tensor:
    """Inputs [..., D] of an 8-bit linear layer: a scale per row and 128 numbers."""
    return round_groups(
        x, ACTIVATION_GROUP, power_of_two=power_of_two, amax_floor=1e-10, dtype=dtype
    )


def round_bfloat16(x: Tensor) -> Tensor:
    """x as a reader of bfloat16 memory gets it, in x's dtype; straight-through."""
    if x.dtype == torch.bfloat16:
        return x
    return straight_through(x, x.detach().bfloat16().to(x.dtype))


def _grouped(x: Tensor, size: int) -> Tensor:
    """[..., G, size], filled up with zeros."""
    missing = -x.shape[-1] % size
    if missing:
        x = F.pad(x, (0, missing))
    return x.unflatten(-1, (-1, size))


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, values: Tensor) -> Tensor:
        ctx.dtype = x.dtype
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0].to(ctx.dtype), None
