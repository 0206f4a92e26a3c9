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
    dx = (dy - sum(dy * y)) / s. Backward repeats the steps instead of keeping them. Tokens stand
    last inside, so that sums over four numbers run along whole rows of tokens.
    """

    @staticmethod
    def forward(ctx: Any, matrices_TNN: Tensor, iterations: int, eps: float) -> Tensor:
        ctx.save_for_backward(matrices_TNN)
        ctx.iterations, ctx.eps = iterations, eps
        x_NNT = _tokens_last(matrices_TNN)
        for dim in _dims(iterations):
            x_NNT = x_NNT / x_NNT.sum(dim, keepdim=True).add_(eps)
        # A sharded module may not return a view, and `contiguous` copies only what needs it.
        return x_NNT.permute(2, 0, 1).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None, None]:
        (matrices_TNN,) = ctx.saved_tensors
        x_NNT, steps = _tokens_last(matrices_TNN), []
        for dim in _dims(ctx.iterations):
            total = x_NNT.sum(dim, keepdim=True).add_(ctx.eps)
            x_NNT = x_NNT / total
            steps.append((dim, total, x_NNT))
        g_NNT = _tokens_last(upstream[0])
        for dim, total, y_NNT in reversed(steps):
            g_NNT = (g_NNT - (g_NNT * y_NNT).sum(dim, keepdim=True)) / total
        return g_NNT.permute(2, 0, 1), None, None


def sinkhorn(matrices_TNN: Tensor, iterations: int, eps: float) -> Tensor:
    """Nearly doubly stochastic matrices: columns sum to 1, rows nearly."""
    result: Tensor = Sinkhorn.apply(matrices_TNN, iterations, eps)
    return result


def _tokens_last(x_TNN: Tensor) -> Tensor:
    return x_TNN.permute(1, 2, 0).contiguous()


def _dims(iterations: int) -> list[int]:
    """0 sums over rows and so normalises columns."""
    return [0, *[1, 0] * (iterations - 1)]
