"""The gated delta rule over packed documents, chunk by chunk.

Per value head and token, from a zero state at every document start (float32):

    S <- exp(g) S;  S <- S + k (x) beta (v - k^T S);  o = q^T S

Within a chunk all tokens are done at once: with G the running sum of g and D_ij = exp(G_i - G_j)
for j <= i, the corrections solve (I + A) X = ..., A = strictly lower (beta K K^T D). Only the state
between chunks is carried in a loop, for all documents together.

T tokens, M chunks, C tokens of a chunk, K key heads, V value heads, B = V / K value heads of one
key head, D key size, E value size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl_model_qwen3_8.chunks import Chunks


def gated_delta_rule(
    q_TKD: Tensor, k_TKD: Tensor, v_TVE: Tensor, g_TV: Tensor, beta_TV: Tensor, chunks: Chunks
) -> Tensor:
    """Outputs [T, V, E], float32. `g` is the logarithm of the decay, at most 0; value head h reads
    key head h // (V / K). q, k as they enter the rule: normalised and scaled."""
    heads = q_TKD.shape[1]
    q_MK1CD, k_MK1CD = (_in_chunks(x, chunks)[:, :, None] for x in (q_TKD, k_TKD))
    v = _in_chunks(v_TVE, chunks).unflatten(1, (heads, -1))
    beta = _in_chunks(beta_TV[..., None], chunks).unflatten(1, (heads, -1))
    g = _in_chunks(g_TV[..., None], chunks).unflatten(1, (heads, -1))
    decay_MKBCC = _pairwise_decay(g)
    grown = g.cumsum(-2).exp()
    k_T = k_MK1CD.transpose(-1, -2)
    lower = ((k_MK1CD @ k_T) * decay_MKBCC * beta).tril(-1)
    sides = torch.cat((beta * v, beta * grown * k_MK1CD), dim=-1)
    solved = torch.linalg.solve_triangular(lower, sides, upper=False, unitriangular=True)
    u, w = solved.split((v.shape[-1], k_TKD.shape[-1]), dim=-1)
    inner = (q_MK1CD @ k_T) * decay_MKBCC
    if len(chunks.running) > 1:
        keys = k_MK1CD * decay_MKBCC[..., -1, :, None]
        states, u = _carry(u, w, keys, grown[..., -1:, :], chunks.running)
        out = (q_MK1CD * grown) @ states + inner @ u
    else:
        out = inner @ u
    out_PVE = out.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
    return out_PVE.index_select(0, chunks.places_T)


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


def _carry(
    u: Tensor, w: Tensor, keys: Tensor, decay: Tensor, running: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """States before every chunk [M, K, B, D, E], and u corrected by what they already hold."""
    state = u.new_zeros(running[0], *u.shape[1:3], w.shape[-1], u.shape[-1])
    states, corrected = [], []
    start = 0
    for count in running:
        part = slice(start, start + count)
        state = state[:count]
        rest = u[part] - w[part] @ state
        states.append(state)
        corrected.append(rest)
        state = decay[part] * state + keys[part].transpose(-1, -2) @ rest
        start += count
    return torch.cat(states), torch.cat(corrected)
