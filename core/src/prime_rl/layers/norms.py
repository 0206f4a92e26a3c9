"""RMS normalisation. H hidden size; leading dimensions are free."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension.

    Statistics are float32 whatever x is; the normalised value is rounded to x's dtype before the
    weight multiplies it, as servers do. The result has x's dtype.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The function of RMSNorm; weight [H], or [heads, H] with a row of its own for every head."""
    if x.dtype == torch.float32 == weight.dtype and weight.dim() == 1:
        return F.rms_norm(x, weight.shape, weight, eps)
    # Without a weight, the kernel rounds where servers do: after normalising, before the weight.
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight.to(x.dtype)
