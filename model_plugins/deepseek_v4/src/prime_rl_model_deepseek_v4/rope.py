"""Rope on the last numbers of a head, in float32. T rows, D head size."""

from __future__ import annotations

import torch
from torch import Tensor

from prime_rl.layers.rotary import PairRotation, rotate_pairs


def rotate_tail(x_T_D: Tensor, rotation: PairRotation, inverse: bool = False) -> Tensor:
    """Turn the adjacent pairs of the last 2R numbers of x [T, ..., D]; the others stay.

    The angles are float32 and so is the arithmetic; the result has x's dtype.
    """
    still = x_T_D.shape[-1] - 2 * rotation.cos_TR.shape[-1]
    turned = rotate_pairs(x_T_D[..., still:], rotation, inverse)
    return torch.cat((x_T_D[..., :still], turned), dim=-1) if still else turned
