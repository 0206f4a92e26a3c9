"""The IcePop loss.

lt, li: log-probability of a token at the trainer and at the sampler; r = exp(lt - li);
A: advantage.

    keep     = log(ratio_low) <= lt - li <= log(ratio_high)
    loss     = -adv_tau * A * r  where kept, 0 elsewhere

Tokens outside the band are dropped, not clipped: they have neither loss nor gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from prime_rl.api import Loss, LossInputs, LossOutput
from prime_rl_loss_icepop.config import IcePopConfig

if TYPE_CHECKING:
    from torch import Tensor

MISMATCH_LOG_BOUND = math.log(1e30)


class IcePop(Loss):
    """Policy gradient on the tokens whose importance ratio lies in a band, whatever A's sign."""

    Config = IcePopConfig

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Loss per token; metrics is_masked, masked_mismatch_kl and unmasked_mismatch_kl."""
        log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
        fixed = log_ratio.detach()
        keep = self._in_band(fixed)
        # Selected before exp: what was dropped cannot overflow, and 0 * inf cannot arise.
        ratio = log_ratio.masked_fill(~keep, 0.0).exp().masked_fill(~keep, 0.0)
        mismatch = mismatch_kl(fixed)
        metrics = {
            "is_masked": ~keep,
            "masked_mismatch_kl": mismatch.masked_fill(keep, 0.0),
            "unmasked_mismatch_kl": mismatch.masked_fill(~keep, 0.0),
        }
        loss = -self.config.adv_tau * inputs.advantages * ratio
        return LossOutput(loss=loss, metrics=metrics, keep=keep)

    def _in_band(self, log_ratio: Tensor) -> Tensor:
        """bool [N]; the bounds belong to the band, at the precision of log_ratio."""
        low, high = self.config.ratio_low, self.config.ratio_high
        keep = log_ratio <= log_ratio.new_tensor(math.log(high))
        return keep & (log_ratio >= log_ratio.new_tensor(math.log(low))) if low else keep


def mismatch_kl(log_ratio: Tensor) -> Tensor:
    """r - 1 - log r per token, at most 1e30."""
    return (log_ratio.clamp(max=MISMATCH_LOG_BOUND).expm1() - log_ratio).clamp(0.0, 1e30)
