"""The gated delta rule over packed documents, chunk by chunk.

Per value head and token, from a zero state at every document start (float32):

    S <- exp(g) S;  S <- S + k (x) beta (v - k^T S);  o = q^T S

Within a chunk all tokens are done at once: with G the running sum of g and D_ij = exp(G_i - G_j)
for j <= i, the corrections solve (I + A) X = ..., A = strictly lower (beta K K^T D). Only the state
between chunks is carried in a loop, for all documents and heads together.

T tokens, M chunks, C tokens of a chunk, K key heads, V value heads, B = V / K value heads of one
key head, D key size, E value size.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from prime_rl_model_qwen3_8.chunks import Chunks
from prime_rl_model_qwen3_8.state import CarryState

GROUP_BYTES = 2 * 2**30
"""Heads are prepared in groups whose intermediates fit; each group is recomputed in backward."""


class Prepared(NamedTuple):
    """What is known of every chunk before the state that enters it."""

    corrections: Tensor
    """[M, V, C, E] from a zero state."""
    within: Tensor
    """[M, V, C, C] what a token reads of the corrections of its chunk."""
    reads: Tensor
    """[M, V, C, D] what a token reads of the state that enters."""
    known: Tensor
    """[M, V, C, D] what corrections take back of that state."""
    keys: Tensor
    """[M, V, C, D] how corrections enter the state that leaves."""
    decay: Tensor
    """[M, V, 1, 1] what remains of the state."""


def gated_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_TVE: Tensor, g_TV: Tensor, beta_TV: Tensor, chunks: Chunks
) -> Tensor:
    """Outputs [T, V, E], float32. `g` is the logarithm of the decay, at most 0; value head h reads
    key head h // (V / K). q, k as they enter the rule: normalised and scaled."""
    heads, group = q_TKD.shape[1], v_TVE.shape[1] // q_TKD.shape[1]
    places, size = chunks.rows_MC.numel(), chunks.rows_MC.shape[1]
    widths = k_TKD.shape[2] + v_TVE.shape[2] + size
    per_head = 4 * places * group * 6 * widths  # bytes; about six tensors of each kind
    step = max(1, GROUP_BYTES // max(1, per_head))
    if step >= heads:
        ready = _prepare(q_TKD, k_TKD, v_TVE, g_TV, beta_TV, chunks)
    else:
        parts = []
        for start in range(0, heads, step):
            keys, values = slice(start, start + step), slice(start * group, (start + step) * group)
            own = (q_TKD[:, keys], k_TKD[:, keys], v_TVE[:, values])
            more = (g_TV[:, values], beta_TV[:, values])
            parts.append(checkpoint(_prepare, *own, *more, chunks, use_reentrant=False))
        ready = Prepared(*(torch.cat(tensors, dim=1) for tensors in zip(*parts, strict=True)))
    corrections, out = ready.corrections, 0
    if len(chunks.running) > 1:
        states, corrections = CarryState.apply(
            corrections, ready.known, ready.keys, ready.decay, chunks.running
        )
        out = ready.reads @ states
    out_MVCE = out + ready.within @ corrections
    out_PVE = out_MVCE.transpose(1, 2).flatten(0, 1)
    return out_PVE.index_select(0, chunks.places_T)


def _prepare(
    q_TKD: Tensor, k_TKD: Tensor, v_TVE: Tensor, g_TV: Tensor, beta_TV: Tensor, chunks: Chunks
) -> Prepared:
    """For some heads."""
    heads = q_TKD.shape[1]
    q_MK1CD, k_MK1CD = (_in_chunks(x, chunks)[:, :, None] for x in (q_TKD, k_TKD))
    v, beta, g = (
        _in_chunks(x, chunks).unflatten(1, (heads, -1))
        for x in (v_TVE, beta_TV[..., None], g_TV[..., None])
    )
    decay = _pairwise_decay(g)
    grown = g.cumsum(-2).exp()
    lower = ((k_MK1CD @ k_MK1CD.mT) * decay * beta).tril(-1)
    sides = torch.cat((beta * v, beta * grown * k_MK1CD), dim=-1)
    solved = torch.linalg.solve_triangular(lower, sides, upper=False, unitriangular=True)
    corrections, known = solved.split((v.shape[-1], k_TKD.shape[-1]), dim=-1)
    prepared = Prepared(
        corrections=corrections,
        within=(q_MK1CD @ k_MK1CD.mT) * decay,
        reads=q_MK1CD * grown,
        known=known,
        keys=k_MK1CD * decay[..., -1, :, None],
        decay=grown[..., -1:, :],
    )
    return Prepared(*(part.flatten(1, 2) for part in prepared))


def _in_chunks(x_TNX: Tensor, chunks: Chunks) -> Tensor:
    """float32 [M, N, C, X]; zeros where a chunk has no token."""
    padded = F.pad(x_TNX.float(), (0, 0, 0, 0, 0, 1))
    rows_MC = chunks.rows_MC
    gathered = padded.index_select(0, rows_MC.flatten()).unflatten(0, rows_MC.shape)
    return gathered.transpose(1, 2)


def _pairwise_decay(g: Tensor) -> Tensor:
    """exp(g_{j+1} + .. + g_i) for j <= i, 0 above the diagonal; g [.., C, 1].

    Every sum is taken on its own: differences of running sums lose digits when decays are strong,
    and so do their gradients.
    """
    size = g.shape[-2]
    ones = torch.ones(size, size, dtype=torch.bool, device=g.device)
    sums = g.expand(*g.shape[:-1], size).masked_fill(ones.triu(), 0.0).cumsum(-2)
    # Masked before exp: a column ends at its diagonal.
    return sums.masked_fill(ones.triu(1), -torch.inf).exp()
