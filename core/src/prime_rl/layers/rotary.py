"""Rotary position embedding: angles of a batch, rotation of heads.

D rotary dimension; pairs are (i, i + D/2): the "NeoX" halves.
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


class Rotary:
    """Makes the angles of a batch; keeps the frequencies once per device. Holds no weights."""

    def __init__(self, settings: RotarySettings) -> None:
        self.settings = settings
        self._frequencies: dict[torch.device, Tensor] = {}

    def __call__(self, positions_T: Tensor, dtype: torch.dtype) -> Rotation:
        """Cosine and sine for these positions; angles are float32, the result `dtype`."""
        device = positions_T.device
        if device not in self._frequencies:
            self._frequencies[device] = torch.tensor(
                self.settings.inverse_frequencies, dtype=torch.float32, device=device
            )
        angles_TR = positions_T.float()[:, None] * self._frequencies[device]
        cos_TR, sin_TR = (
            angles_TR.cos() * self.settings.scale,
            angles_TR.sin() * self.settings.scale,
        )
        return Rotation(
            torch.cat((cos_TR, cos_TR), dim=-1).to(dtype),
            torch.cat((-sin_TR, sin_TR), dim=-1).to(dtype),
        )


def rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    """Turn every head of x [T, heads, D]."""
    first, second = x_THD.chunk(2, dim=-1)
    swapped_THD = torch.cat((second, first), dim=-1)  # three times faster than roll on an H200
    return torch.addcmul(x_THD * rotation.cos_TD[:, None], swapped_THD, rotation.sin_TD[:, None])
