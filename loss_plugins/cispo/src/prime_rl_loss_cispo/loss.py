"""The CISPO loss.

lt, li: log-probability of a token at the trainer and at the sampler; r = exp(lt - li);
A: advantage.

    weight   = clip(r, ratio_low, ratio_high), a constant: no gradient flows through it
    loss     = -weight * A * lt

Every token keeps a gradient, -weight * A * grad lt, however far it moved.
"""

from __future__ import annotations

import math

from prime_rl.api import Loss, LossInputs, LossOutput
from prime_rl_loss_cispo.config import CISPOConfig


class CISPO(Loss):
    """Policy gradient with clipped importance ratios as constant weights. Masks nothing."""

    Config = CISPOConfig

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Loss per token; metric is_clipped: r lies outside [ratio_low, ratio_high]."""
        low, high = self.config.ratio_low, self.config.ratio_high
        log_low, log_high = math.log(low) if low else -math.inf, math.log(high)
        log_ratio = inputs.trainer_logprobs.detach() - inputs.inference_logprobs
        # Clipped before exp: nothing overflows, whatever the gap.
        weight = log_ratio.clamp(log_low, log_high).exp()
        return LossOutput(
            loss=-weight * inputs.advantages * inputs.trainer_logprobs,
            metrics={"is_clipped": (log_ratio > log_high) | (log_ratio < log_low)},
        )
