"""The IPO loss.

lt, li: log-probability of a token at the trainer and at the sampler; r = exp(lt - li);
A: advantage.

    keep     = |exp(lt) - exp(li)| <= eps            with m = max(lt, li), d = min(lt, li) - m:
               |exp(lt) - exp(li)| = exp(m) * -expm1(d)
    c(r)     = min(r, max_importance_ratio), whose gradient is c(r) * grad lt: it shrinks to the
               bound and does not vanish behind it
    loss     = -adv_tau * A * c(r)  where kept, 0 elsewhere
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prime_rl.api import Loss, LossInputs, LossOutput
from prime_rl_loss_ipo.config import IPOConfig

if TYPE_CHECKING:
    from torch import Tensor

MISMATCH_LOG_BOUND = math.log(1e30)


class IPO(Loss):
    """Policy gradient with a two-sided mask on the change of probability, whatever A's sign."""

    Config = IPOConfig

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Loss per token; metrics is_masked, masked_mismatch_kl and unmasked_mismatch_kl."""
        lt, li = inputs.trainer_logprobs, inputs.inference_logprobs
        keep = probability_change(lt.detach(), li) <= self.config.eps
        ratio = self._capped_ratio(lt, li, keep)
        loss = -self.config.adv_tau * inputs.advantages * ratio
        mismatch = mismatch_kl(lt.detach(), li)
        metrics = {
            "is_masked": ~keep,
            "masked_mismatch_kl": mismatch.masked_fill(keep, 0.0),
            "unmasked_mismatch_kl": mismatch.masked_fill(~keep, 0.0),
        }
        return LossOutput(loss=loss, metrics=metrics, keep=keep)

    def _capped_ratio(self, lt: Tensor, li: Tensor, keep: Tensor) -> Tensor:
        """c(r) of kept tokens, 0 elsewhere. Selected and bounded before exp: nothing overflows."""
        log_cap = math.log(self.config.max_importance_ratio)
        capped = (lt.detach() - li).clamp(max=log_cap).exp().masked_fill(~keep, 0.0)
        return capped * (1.0 + (lt - lt.detach()))


def probability_change(lt: Tensor, li: Tensor) -> Tensor:
    """|exp(lt) - exp(li)| without cancellation."""
    larger = lt.maximum(li)
    return larger.exp() * -(lt.minimum(li) - larger).expm1()


def mismatch_kl(lt: Tensor, li: Tensor) -> Tensor:
    """r - 1 - log r per token, at most 1e30."""
    log_ratio = lt - li
    return (log_ratio.clamp(max=MISMATCH_LOG_BOUND).expm1() - log_ratio).clamp(0.0, 1e30)
