"""Log-probabilities and entropies of given tokens, by chunks: full logits never exist.

N scored tokens, H hidden size, V vocabulary, M kept candidates of all scored tokens together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class KeptTokens:
    """The candidates a truncating sampler (top-p, top-k) kept, in compressed rows.

    A row without ids means: the whole vocabulary.
    """

    ids_M: Tensor
    """int64 [M] token ids of all rows, one row after the other."""
    rows_M: Tensor
    """int64 [M] row of each id, not decreasing."""
    borders: tuple[int, ...]
    """N + 1 places in `ids_M` where rows begin, on the host."""

    def part(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """(ids, rows counted from `start`) of rows start..stop-1."""
        first, last = self.borders[start], self.borders[stop]
        return self.ids_M[first:last], self.rows_M[first:last] - start


def token_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    targets_N: Tensor,
    temperatures_N: Tensor,
    kept: KeptTokens | None = None,
    chunk_tokens: int = 1024,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each target, entropy), both float32 [N] in nats.

    Row n of `hidden_NH` is the state that predicts `targets_N[n]`; logits are float32 and divided
    by `temperatures_N[n]`. With kept candidates the log-probability is renormalised over them:
    logit[y]/T - logsumexp(logit[kept]/T). The entropy is that of the full distribution at the same
    temperature and carries no gradient; it is zero when `with_entropy` is false. At most
    `chunk_tokens` rows of logits exist at one time; backward recomputes them. N may be 0: the
    result is still attached to both inputs.
    """
    logprobs_N, entropies_N = _ChunkedLogprobs.apply(
        hidden_NH, weight_VH, targets_N, temperatures_N, kept, chunk_tokens, with_entropy
    )
    return logprobs_N, entropies_N


class _ChunkedLogprobs(torch.autograd.Function):
    """Saves states, not logits; only the last chunk's distribution survives until backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        targets_N: Tensor,
        temperatures_N: Tensor,
        kept: KeptTokens | None,
        chunk_tokens: int,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        count = hidden_NH.shape[0]
        logprobs_N = torch.empty(count, dtype=torch.float32, device=hidden_NH.device)
        entropies_N = torch.zeros_like(logprobs_N)
        normalised_nV: Tensor | None = None
        for start, stop in _chunks(count, chunk_tokens):
            del normalised_nV
            normalised_nV = _log_softmax(
                hidden_NH[start:stop], weight_VH, temperatures_N[start:stop]
            )
            chosen_n = normalised_nV.gather(1, targets_N[start:stop, None]).squeeze(1)
            if kept is not None:
                chosen_n = chosen_n - _log_kept_mass(normalised_nV, *kept.part(start, stop))
            logprobs_N[start:stop] = chosen_n
            if with_entropy:
                entropies_N[start:stop] = _entropy(normalised_nV)
        ctx.save_for_backward(hidden_NH, weight_VH, targets_N, temperatures_N, normalised_nV)
        ctx.kept, ctx.chunk_tokens = kept, chunk_tokens
        ctx.mark_non_differentiable(entropies_N)
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, targets_N, temperatures_N, normalised_nV = ctx.saved_tensors
        gradient_N = gradients[0] / temperatures_N
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        hidden_grad_NH = torch.zeros_like(hidden_NH) if needs_hidden else None
        weight_grad_VH: Tensor | None = None
        for start, stop in reversed(_chunks(hidden_NH.shape[0], ctx.chunk_tokens)):
            if normalised_nV is None:
                normalised_nV = _log_softmax(
                    hidden_NH[start:stop], weight_VH, temperatures_N[start:stop]
                )
            logits_grad_nV = _logits_gradient(
                normalised_nV, targets_N[start:stop], gradient_N[start:stop], ctx.kept, start
            )
            normalised_nV = None
            logits_grad_nV = logits_grad_nV.to(hidden_NH.dtype)
            if hidden_grad_NH is not None:
                hidden_grad_NH[start:stop] = logits_grad_nV @ weight_VH
            if needs_weight:
                part_VH = _product(logits_grad_nV.T, hidden_NH[start:stop])
                weight_grad_VH = part_VH if weight_grad_VH is None else weight_grad_VH.add_(part_VH)
        if needs_weight:
            if weight_grad_VH is None:
                weight_grad_VH = torch.zeros_like(weight_VH)
            weight_grad_VH = weight_grad_VH.to(weight_VH.dtype)
        return hidden_grad_NH, weight_grad_VH, None, None, None, None, None


def _chunks(count: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, count)) for start in range(0, count, size)]


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product accumulated and returned in float32."""
    if left.dtype == torch.float32:
        return left @ right
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()


def _log_softmax(hidden_nH: Tensor, weight_VH: Tensor, temperatures_n: Tensor) -> Tensor:
    logits_nV = _product(hidden_nH, weight_VH.T)
    logits_nV.div_(temperatures_n[:, None])
    return torch.log_softmax(logits_nV, dim=1)


def _entropy(normalised_nV: Tensor) -> Tensor:
    """-sum p log p."""
    return -normalised_nV.exp().mul_(normalised_nV).sum(dim=1)


def _log_kept_mass(normalised_nV: Tensor, ids_m: Tensor, rows_m: Tensor) -> Tensor:
    """[n] log of the probability that the kept candidates have together; 0 where all are kept."""
    count = normalised_nV.shape[0]
    values_m = normalised_nV[rows_m, ids_m]
    largest_n = values_m.new_full((count,), float("-inf"))
    largest_n.scatter_reduce_(0, rows_m, values_m, "amax")
    mass_n = values_m.new_zeros(count).index_add_(0, rows_m, (values_m - largest_n[rows_m]).exp())
    return torch.where(largest_n > float("-inf"), largest_n + mass_n.log(), 0.0)


def _logits_gradient(
    normalised_nV: Tensor,
    targets_n: Tensor,
    gradient_n: Tensor,
    kept: KeptTokens | None,
    start: int,
) -> Tensor:
    """d loss / d (logit / T), times what `gradient_n` holds: g * (onehot - p). Uses its first
    argument up; p is the renormalised distribution where candidates were kept."""
    count = normalised_nV.shape[0]
    if kept is None:
        gradient_nV = normalised_nV.exp_().mul_(-gradient_n[:, None])
    else:
        ids_m, rows_m = kept.part(start, start + count)
        log_mass_n = _log_kept_mass(normalised_nV, ids_m, rows_m)
        kept_m = (normalised_nV[rows_m, ids_m] - log_mass_n[rows_m]).exp() * -gradient_n[rows_m]
        is_full_n = torch.ones(count, dtype=torch.bool, device=gradient_n.device)
        is_full_n[rows_m] = False
        gradient_nV = normalised_nV.exp_().mul_((-gradient_n * is_full_n)[:, None])
        gradient_nV.index_put_((rows_m, ids_m), kept_m, accumulate=True)
    return gradient_nV.scatter_add_(1, targets_n[:, None], gradient_n[:, None])
