"""Rotary position embedding: angles of a batch, rotation of heads.

D rotary dimension; pairs are (i, i + D/2): the "NeoX" halves.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prime_rl.layers.rotary_settings import RotarySettings


class Rotation(NamedTuple):
    """Cosine and sine of a batch's positions, [T, D], both halves filled."""

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
        angles_TD = torch.cat((angles_TR, angles_TR), dim=-1)
        scale = self.settings.scale
        return Rotation((angles_TD.cos() * scale).to(dtype), (angles_TD.sin() * scale).to(dtype))


def rotate(x_THD: Tensor, rotation: Rotation) -> Tensor:
    """Turn every head of x [T, heads, D]."""
    first, second = x_THD.chunk(2, dim=-1)
    turned_THD = torch.cat((-second, first), dim=-1)
    return x_THD * rotation.cos_TD[:, None] + turned_THD * rotation.sin_TD[:, None]
