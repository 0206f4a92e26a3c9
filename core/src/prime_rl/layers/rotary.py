"""Rotary position embedding: angles of a batch, rotation of heads.

D rotary dimension, R = D/2 pairs: (i, i + R), the "NeoX" halves, or (2i, 2i + 1), adjacent.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prime_rl.layers.rotary_settings import RotarySettings


class Rotation(NamedTuple):
    """Cosine and sine of a batch's positions, [T, D], both halves filled.

    The first half of the sine is negated: turning a head is then x * cos + swapped halves * sin.
    """

    cos_TD: Tensor
    sin_TD: Tensor


class PairRotation(NamedTuple):
    """Cosine and sine of a batch's positions, [T, R], one number for each adjacent pair."""

    cos_TR: Tensor
    sin_TR: Tensor


class Rotary:
    """Makes the angles of a batch; keeps the frequencies once per device. Holds no weights."""

    def __init__(self, settings: RotarySettings) -> None:
        self.settings = settings
        self._frequencies: dict[torch.device, Tensor] = {}

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosine and sine for these positions; angles are float32, the result `dtype`."""
        cos_TR, sin_TR = self._angles(positions_T)
        return Rotation(
            torch.cat((cos_TR, cos_TR), dim=-1).to(dtype),
            torch.cat((-sin_TR, sin_TR), dim=-1).to(dtype),
        )

    def pairs(self, positions_T: Tensor, dtype: torch.dtype) -> PairRotation:
        """The same for adjacent pairs."""
        cos_TR, sin_TR = self._angles(positions_T)
        return PairRotation(cos_TR.to(dtype), sin_TR.to(dtype))

    def _angles(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine [T, R], float32."""
        device = positions_T.device
        if device not in self._frequencies:
            self._frequencies[device] = torch.tensor(
                self.settings.inverse_frequencies, dtype=torch.float32, device=device
            )
        angles_TR = positions_T.float()[:, None] * self._frequencies[device]
        scale = self.settings.scale
        return angles_TR.cos() * scale, angles_TR.sin() * scale


def rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    """Turn every head of x [T, heads, D]."""
    first, second = x_THD.chunk(2, dim=-1)
    swapped_THD = torch.cat((second, first), dim=-1)  # three times faster than roll on an H200
    return torch.addcmul(x_THD * rotation.cos_TD[:, None], swapped_THD, rotation.sin_TD[:, None])


def rotate_pairs(x: Tensor, rotation: PairRotation, inverse: bool = False) -> Tensor:
    """Turn the pairs (2i, 2i + 1) of x [T, ..., D]; the result keeps their places.

    `inverse` turns back. Computed in the wider of both dtypes, returned in x's.
    """
    shape = (x.shape[0], *[1] * (x.dim() - 2), x.shape[-1] // 2)  # x may have no rows
    cos, sin = (part.view(shape) for part in rotation)
    if inverse:
        sin = -sin
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)
