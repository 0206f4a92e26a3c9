"""RMS normalisation. H hidden size; leading dimensions are free."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension; statistics are float32 whatever x is.

    The normalised value is rounded to x's dtype before the weight multiplies it; with `round_late`
    the weight multiplies in float32 and one rounding ends it. `zero_centred`: the factor is
    1 + weight. The result has x's dtype.
    """

    def __init__(
        self, size: int, eps: float, *, zero_centred: bool = False, round_late: bool = False
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.zero_centred = zero_centred
        self.round_late = round_late

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight.float() if self.zero_centred else self.weight
        if self.round_late:
            return rms_norm_late(x, weight, self.eps)
        return rms_norm(x, weight, self.eps)


def rms_norm_late(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMS norm in float32 to the end, then one rounding to x's dtype; `weight` as in rms_norm."""
    if weight is not None and x.is_cpu and x.dtype == torch.float32 == weight.dtype:
        return rms_norm(x, weight, eps)
    normal = F.rms_norm(x.float(), x.shape[-1:], None, eps)
    if weight is not None:
        normal = normal * weight.float()
    return normal.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The function of RMSNorm; weight [H], or [heads, H] with a row of its own for every head."""
    if x.is_cpu and x.dtype == torch.float32 == weight.dtype:
        result: Tensor = _PlainRMSNorm.apply(x, weight, eps)
        return result
    # Without a weight, the kernel rounds where servers do: after normalising, before the weight.
    return F.rms_norm(x, x.shape[-1:], None, eps) * weight.to(x.dtype)


class _PlainRMSNorm(torch.autograd.Function):
    """float32 on a CPU, where torch composes the norm of some ten operations each way: this takes
    half the time and keeps one number per row beside x for the backward pass.

    r = (|x|^2 / H + eps)^(-1/2), y = x r w. With upstream g and t = g x r:
    dw = sum of t over rows; dx = g w r - x r^2 <t, w> / H.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        inverse = torch.addcmul(x.new_tensor([eps]), length, length, value=1 / x.shape[-1])
        inverse.rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return x * inverse * weight  # in place, traced blocks would have no gradients

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        (g,) = upstream
        x, weight, inverse = ctx.saved_tensors
        t = (g * x).mul_(inverse)
        along = (t * weight).sum(-1, keepdim=True)
        d_weight = t.reshape(-1, *weight.shape).sum(0)
        factor = inverse.square().mul_(along).mul_(-1 / x.shape[-1])
        return (g * weight).mul_(inverse).addcmul_(x, factor), d_weight, None
