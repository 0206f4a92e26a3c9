"""Sinkhorn normalisation of small matrices, with the gradient through every step.

T tokens, N streams; matrices [T, N, N].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Sinkhorn(torch.autograd.Function):
    """Columns, then (rows, columns) again and again: `iterations` times columns in all.

    One step is y = x / s with s = sum(x) + eps along a dimension, and its gradient
    dx = (dy - sum(dy * y)) / s. Backward repeats the steps instead of keeping them.
    """

    @staticmethod
    def forward(ctx: Any, matrices_TNN: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(matrices_TNN)
        ctx.iterations, ctx.eps = iterations, eps
        x = matrices_TNN
        for dim in _dims(iterations):
            x = x / x.sum(dim, keepdim=True).add_(eps)
        return x

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        steps = []
        for dim in _dims(ctx.iterations):
            total = x.sum(dim, keepdim=True).add_(ctx.eps)
            x = x / total
            steps.append((dim, total, x))
        (g,) = upstream
        for dim, total, y in reversed(steps):
            g = (g - (g * y).sum(dim, keepdim=True)) / total
        return g, None, None


def sinkhorn(matrices_TNN: Tensor, iterations: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices: columns sum to 1, rows nearly."""
    result: Tensor = Sinkhorn.apply(matrices_TNN, iterations, eps)
    return result


def _dims(iterations: int) -> list[int]:
    """-2 sums over rows and so normalises columns."""
    return [-2, *[-1, -2] * (iterations - 1)]
