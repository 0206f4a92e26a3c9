"""Carries the state of the delta rule from chunk to chunk, with a backward of its own.

u corrections, w what they take back, k how they enter the state, a what remains of it:

    u' = u - w S;  S' = a S + k^T u'

Backward, with dS' the gradient of the state that leaves: du = du' + k dS', and the gradient of the
state that entered is dS + a dS' - w^T du. Only these run in a loop, three operations a step; the
gradients of w, k and a are products over all chunks at once.

M chunks in the order of `Chunks`, V value heads, C tokens of a chunk, D key size, E value size,
N = M * V.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


class CarryState(torch.autograd.Function):
    """(states before every chunk [M, V, D, E], corrections u' [M, V, C, E]) from u [M, V, C, E],
    w and k [M, V, C, D], a [M, V, 1, 1] and the number of documents running at each step."""

    @staticmethod
    def forward(
        ctx: Any, u: Tensor, w: Tensor, k: Tensor, a: Tensor, running: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        chunks, heads = u.shape[:2]
        u, w, k, a = (tensor.flatten(0, 1) for tensor in (u, w, k, a))
        k_NDC = k.mT
        states = u.new_empty(u.shape[0], w.shape[2], u.shape[2])
        corrected = torch.empty_like(u, memory_format=torch.contiguous_format)
        state = u.new_zeros(running[0] * heads, w.shape[2], u.shape[2])
        for part in _steps(running, heads):
            state = state[: part.stop - part.start]
            states[part] = state
            torch.baddbmm(u[part], w[part], state, alpha=-1, out=corrected[part])
            state = torch.baddbmm(state * a[part], k_NDC[part], corrected[part])
        ctx.save_for_backward(w, k, a, states, corrected)
        ctx.running, ctx.heads = running, heads
        return states.unflatten(0, (chunks, heads)), corrected.unflatten(0, (chunks, heads))

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        w, k, a, states, corrected = ctx.saved_tensors
        d_states, d_corrected = (tensor.flatten(0, 1) for tensor in upstream)
        w_NDC = w.mT
        d_u = torch.empty_like(corrected)
        leaving = torch.zeros_like(states)
        """Gradient of the state after every chunk; zero after a document's last."""
        entering = states[:0]
        for part in reversed(list(_steps(ctx.running, ctx.heads))):
            after = leaving[part]
            after[: entering.shape[0]] = entering
            torch.baddbmm(d_corrected[part], k[part], after, out=d_u[part])
            entering = torch.addcmul(d_states[part], after, a[part])
            entering = torch.baddbmm(entering, w_NDC[part], d_u[part], alpha=-1)
        gradients = (
            d_u,
            (d_u @ states.mT).neg_(),
            corrected @ leaving.mT,
            (states * leaving).sum((1, 2), keepdim=True),
        )
        return *(tensor.unflatten(0, (-1, ctx.heads)) for tensor in gradients), None


def _steps(running: tuple[int, ...], heads: int) -> Iterator[slice]:
    """The rows [N] of every step."""
    start = 0
    for count in running:
        yield slice(start, start + count * heads)
        start += count * heads
