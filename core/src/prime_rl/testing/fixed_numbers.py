"""Numbers for recordings that are compared bit by bit: the same on every machine, not stored."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def fixed_numbers(*shape: int, seed: int) -> Tensor:
    """float32, about normal with deviation 1.2, between -4 and 4; bfloat16 holds them exactly.

    Whole-number arithmetic and one division by a power of two, so no library's random numbers and
    no rounding take part.
    """
    import torch

    place = torch.arange(prod(shape), dtype=torch.int64)
    mixed = (place * 0x9E3779B1 + (seed + 1) * 0x85EBCA6B) & 0xFFFFFFFF
    for factor in (0x45D9F3B, 0x119DE1F3):
        mixed = ((mixed ^ (mixed >> 16)) * factor) & 0xFFFFFFFF
    mixed = mixed ^ (mixed >> 16)
    total = sum((mixed >> (6 * part)) & 63 for part in range(4)) - 126
    return (total.float() / 32).view(shape)  # type: ignore[union-attr]
