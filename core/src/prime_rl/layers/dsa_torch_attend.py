"""Sparse attention with a backward of its own: both directions work chunk by chunk.

Names as in dsa_torch. With p = softmax over rows and sink, o = p V, upstream g and
delta = <g, o>: dV += p^T g; ds = p * (g V^T - delta); dq = scale ds K; dK += scale ds^T q;
d sink = -sum over queries of p_sink * delta.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from prime_rl.layers.dsa_torch import CHUNK_BYTES


class SparseAttention(torch.autograd.Function):
    """`DSABackend.attend`; keeps one number per query and head beside its inputs and output."""

    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKE: Tensor | None,
        rows_TN: Tensor,
        scale: float,
        sink_H: Tensor | None,
        value_size: int | None,
    ) -> Tensor:
        tokens, heads, _ = q_THD.shape
        values_SKE = k_SKD[..., :value_size] if v_SKE is None else v_SKE
        out_THE = q_THD.new_zeros((tokens, heads, values_SKE.shape[-1]))
        log_sum_TH = torch.full(
            (tokens, heads), torch.inf, dtype=torch.float32, device=q_THD.device
        )
        if k_SKD.shape[0] and rows_TN.shape[1]:
            for part in _chunks(q_THD, k_SKD, rows_TN):
                keys_TNKD, values_TNKE, is_row = _gather(k_SKD, v_SKE, rows_TN[part], value_size)
                scores_TKGN = _scores(q_THD[part], keys_TNKD, is_row, scale)
                log_sum_TKG = _log_sum(scores_TKGN, sink_H)
                weights_TKGN = (scores_TKGN - log_sum_TKG[..., None]).exp()
                mixed = _mix(weights_TKGN.to(q_THD.dtype), values_TNKE)
                out_THE[part] = mixed.flatten(1, 2)
                log_sum_TH[part] = log_sum_TKG.flatten(1)
        ctx.save_for_backward(q_THD, k_SKD, v_SKE, rows_TN, sink_H, out_THE, log_sum_TH)
        ctx.scale, ctx.value_size = scale, value_size
        return out_THE

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_SKD, v_SKE, rows_TN, sink_H, out_THE, log_sum_TH = ctx.saved_tensors
        g_THE = upstream[0]
        key_heads = k_SKD.shape[1]
        size = ctx.value_size
        d_q = torch.zeros_like(q_THD)
        d_k = torch.zeros_like(k_SKD, dtype=torch.float32)
        d_v = None if v_SKE is None else torch.zeros_like(v_SKE, dtype=torch.float32)
        d_values = d_k[..., :size] if d_v is None else d_v
        delta_TH = (g_THE.float() * out_THE.float()).sum(-1)
        if k_SKD.shape[0] and rows_TN.shape[1]:
            for part in _chunks(q_THD, k_SKD, rows_TN):
                rows = rows_TN[part]
                keys_TNKD, values_TNKE, is_row = _gather(k_SKD, v_SKE, rows, size)
                q = q_THD[part]
                scores_TKGN = _scores(q, keys_TNKD, is_row, ctx.scale)
                log_sum = log_sum_TH[part].unflatten(1, (key_heads, -1))
                weights_TKGN = (scores_TKGN - log_sum[..., None]).exp()
                g_TKGE = g_THE[part].unflatten(1, (key_heads, -1))
                towards = torch.einsum("tkge,tnke->tkgn", g_TKGE, values_TNKE).float()
                delta = delta_TH[part].unflatten(1, (key_heads, -1))[..., None]
                d_scores = (weights_TKGN * (towards - delta) * ctx.scale).to(q.dtype)
                q_TKGD = q.unflatten(1, (key_heads, -1))
                d_q[part] = torch.einsum("tkgn,tnkd->tkgd", d_scores, keys_TNKD).flatten(1, 2)
                d_keys = torch.einsum("tkgn,tkgd->tnkd", d_scores, q_TKGD)
                d_chosen = torch.einsum("tkgn,tkge->tnke", weights_TKGN.to(q.dtype), g_TKGE)
                chosen = rows.clamp_min(0).flatten()  # an empty place adds 0 to row 0
                d_k.index_add_(0, chosen, d_keys.flatten(0, 1).float())
                d_values.index_add_(0, chosen, d_chosen.flatten(0, 1).float())
        d_sink = None
        if sink_H is not None:
            sink_weight_TH = (sink_H.float() - log_sum_TH).exp()
            d_sink = -(sink_weight_TH * delta_TH).sum(0).to(sink_H.dtype)
        d_k = d_k.to(k_SKD.dtype)
        d_v = None if d_v is None or v_SKE is None else d_v.to(v_SKE.dtype)
        return d_q, d_k, d_v, None, None, d_sink, None


def _chunks(q_THD: Tensor, k_SKD: Tensor, rows_TN: Tensor) -> list[slice]:
    """Runs of queries whose gathered keys fit CHUNK_BYTES."""
    per_query = rows_TN.shape[1] * k_SKD[0].numel() * k_SKD.element_size()
    step = max(1, CHUNK_BYTES // max(1, per_query))
    tokens = q_THD.shape[0]
    return [slice(start, min(start + step, tokens)) for start in range(0, tokens, step)]


def _gather(
    k_SKD: Tensor, v_SKE: Tensor | None, rows_TN: Tensor, value_size: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and whether a place holds a row; empty places read row 0 and count nothing."""
    is_row = rows_TN >= 0
    flat = rows_TN.clamp_min(0).flatten()
    keys = k_SKD.index_select(0, flat).unflatten(0, rows_TN.shape)
    if v_SKE is None:
        return keys, keys[..., :value_size], is_row
    return keys, v_SKE.index_select(0, flat).unflatten(0, rows_TN.shape), is_row


def _scores(q_THD: Tensor, keys_TNKD: Tensor, is_row_TN: Tensor, scale: float) -> Tensor:
    """float32 [T, K, G, N], -inf where there is no row."""
    q_TKGD = q_THD.unflatten(1, (keys_TNKD.shape[2], -1))
    scores = torch.einsum("tkgd,tnkd->tkgn", q_TKGD, keys_TNKD).float() * scale
    return scores.masked_fill(~is_row_TN[:, None, None], -torch.inf)


def _log_sum(scores_TKGN: Tensor, sink_H: Tensor | None) -> Tensor:
    """log of the softmax's denominator [T, K, G]; +inf for a query without rows and sink, so that
    every weight is exp(-inf) = 0."""
    log_sum = scores_TKGN.logsumexp(-1)
    if sink_H is not None:
        log_sum = torch.logaddexp(log_sum, sink_H.float().view(1, *scores_TKGN.shape[1:3]))
    return log_sum.masked_fill(log_sum == -torch.inf, torch.inf)


def _mix(weights_TKGN: Tensor, values_TNKE: Tensor) -> Tensor:
    """[T, K, G, E]."""
    return torch.einsum("tkgn,tnke->tkge", weights_TKGN, values_TNKE)
