"""The three-component loss of a step, summed over rows and ranks before it is divided.

    loss = S_rl / N_rl + S_ce / N_ce + S_refkl / N_refkl

S_x sums weight * per-token loss over the members of component x; N_x is the sum of rl weights, or
the number of ce or ref_kl members, over all rows of all ranks, and at least 1. A row therefore
never normalises by itself, and how tokens are split over rows and ranks does not matter.

    rl       the loss plugin
    ce       -lt
    ref_kl   -sg(lr - lt) * c(r) where p_t - p_i >= -0.2, else 0; c(r) = min(r, 1e4), which keeps
             its gradient: c(r) * grad lt

lt, li, lr: log-probability of the token at the trainer, the sampler, the reference; r = exp(lt -
li); p = exp(l); sg stops the gradient.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prime_rl.api import Loss, LossInputs, LossOutput
from prime_rl.errors import PluginError, RunError
from prime_rl.trainer.batch import Members, Row
from prime_rl.trainer.streams import Totals

MISMATCH_CAP = 1e30
REF_KL_MAX_RATIO = 1e4
REF_KL_LARGEST_DROP = 0.2


@dataclass(frozen=True)
class ComponentStreams:
    """Per-token numbers of one component, for metrics and traces; all detached."""

    members: Members
    streams: dict[str, Tensor]
    """Name -> [M]"""


@dataclass
class RowLoss:
    """What one row contributes to the loss."""

    total: Tensor
    """Scalar; the sum of this over all rows of all ranks is the loss of the step."""
    components: list[ComponentStreams] = field(default_factory=list)


def row_loss(row: Row, logprobs: Tensor, loss: Loss, totals: Totals) -> RowLoss:
    """The loss of one row, already divided by the step's denominators.

    logprobs: float32 [N] of the row's scored tokens. Without members the result is 0 and still runs
    backward through the whole model. Raises PluginError when the loss plugin breaks its contract.
    """
    result = RowLoss(total=logprobs[:0].sum())
    if row.rl is not None:
        _add_rl(result, row, row.rl, logprobs, loss, max(1.0, totals.rl))
    if row.ce is not None:
        nll = -row.ce.take(logprobs)
        result.total = result.total + _weighted_sum(row.ce, nll) / max(1.0, totals.ce)
        result.components.append(ComponentStreams(row.ce, {"nll": nll.detach()}))
    if row.ref_kl is not None:
        _add_ref_kl(result, row, row.ref_kl, logprobs, max(1.0, totals.ref_kl))
    return result


def _weighted_sum(members: Members, per_token: Tensor) -> Tensor:
    return (per_token if members.weights is None else per_token * members.weights).sum()


def _add_rl(
    result: RowLoss, row: Row, rl: Members, logprobs: Tensor, loss: Loss, denominator: float
) -> None:
    if row.advantages is None or row.inference_logprobs is None:
        raise RunError("rl tokens need the streams advantages and inference_logprobs")
    reference = None
    if row.reference_logprobs is not None:
        reference = rl.take(row.reference_logprobs)
    inputs = LossInputs(
        trainer_logprobs=rl.take(logprobs),
        inference_logprobs=rl.take(row.inference_logprobs),
        advantages=rl.take(row.advantages),
        segment_ids=rl.take(row.segment_ids),
        reference_logprobs=reference,
    )
    output = loss.compute(inputs)
    _check(loss, output, inputs.trainer_logprobs.shape[0])
    result.total = result.total + _weighted_sum(rl, output.loss) / denominator
    streams = {name: metric.detach() for name, metric in output.metrics.items()}
    if output.keep is not None:
        streams["is_masked"] = ~output.keep
    streams["mismatch_kl"] = mismatch_kl(inputs.trainer_logprobs, inputs.inference_logprobs)
    result.components.append(ComponentStreams(rl, streams))


def _check(loss: Loss, output: LossOutput, count: int) -> None:
    """The plugin's output is per token."""
    streams = {"loss": output.loss, **output.metrics}
    if output.keep is not None:
        streams["keep"] = output.keep
    for name, stream in streams.items():
        if tuple(stream.shape) != (count,):
            raise PluginError(
                f"loss {loss.config.type}: {name} has shape {list(stream.shape)}, expected "
                f"[{count}]: one value per scored token, not averaged",
                kind="loss",
                name=loss.config.type,
            )


def _add_ref_kl(
    result: RowLoss, row: Row, members: Members, logprobs: Tensor, denominator: float
) -> None:
    if row.reference_logprobs is None or row.inference_logprobs is None:
        raise RunError("ref_kl tokens need the streams ref_logprobs and inference_logprobs")
    lt = members.take(logprobs)
    li = members.take(row.inference_logprobs)
    fixed = lt.detach()
    keep = fixed.exp() - li.exp() >= -REF_KL_LARGEST_DROP
    ratio = capped_ratio(lt, li, REF_KL_MAX_RATIO, keep)
    difference = members.take(row.reference_logprobs) - fixed
    result.total = result.total + _weighted_sum(members, -difference * ratio) / denominator
    mismatch = mismatch_kl(lt, li)
    streams = {
        "ref_kl": -difference,
        "ref_kl/is_masked": ~keep,
        "ref_kl/masked_mismatch_kl": mismatch.masked_fill(keep, 0.0),
        "ref_kl/unmasked_mismatch_kl": mismatch.masked_fill(~keep, 0.0),
    }
    result.components.append(ComponentStreams(members, streams))


def capped_ratio(lt: Tensor, li: Tensor, cap: float, keep: Tensor) -> Tensor:
    """min(exp(lt - li), cap) of kept tokens, 0 elsewhere; its gradient is itself times grad lt.

    Bounded before exp, so that neither value nor gradient overflows.
    """
    capped = (lt.detach() - li).clamp(max=math.log(cap)).exp().masked_fill(~keep, 0.0)
    return capped * (1.0 + (lt - lt.detach()))


@torch.no_grad()
def mismatch_kl(lt: Tensor, li: Tensor) -> Tensor:
    """r - 1 - log r per token, at most 1e30."""
    log_ratio = lt - li
    bounded = log_ratio.clamp(max=math.log(MISMATCH_CAP)).expm1()
    return (bounded - log_ratio).clamp(0.0, MISMATCH_CAP)
