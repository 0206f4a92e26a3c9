"""The PPO loss.

lt, li: log-probability of a token at the trainer and at the sampler; r = exp(lt - li);
A: advantage.

    c(r)     = min(r, max_importance_ratio), whose gradient is c(r) * grad lt: it shrinks to the
               bound and does not vanish behind it
    clip(r)  = r between ratio_low and ratio_high, a constant outside
    loss     = -min(A * c(r), A * clip(r))
"""

from __future__ import annotations

import math

from prime_rl.api import Loss, LossInputs, LossOutput
from prime_rl_loss_ppo.config import PPOConfig


class PPO(Loss):
    """The pessimistic one of the plain and the clipped objective. Masks nothing."""

    Config = PPOConfig

    def compute(self, inputs: LossInputs) -> LossOutput:
        """Loss per token; metrics is_clipped, ratio_capped.

        is_clipped: the clipped objective is the smaller one, the token has no gradient.
        ratio_capped: r is above max_importance_ratio.
        """
        log_ratio = inputs.trainer_logprobs - inputs.inference_logprobs
        advantages, fixed = inputs.advantages, log_ratio.detach()
        low, high = self.config.ratio_low, self.config.ratio_high
        log_low, log_high = math.log(low) if low else -math.inf, math.log(high)
        log_cap = math.log(self.config.max_importance_ratio)
        # Bounded before exp: nothing overflows, whatever the gap.
        capped = fixed.clamp(max=log_cap).exp() * (1.0 + (log_ratio - fixed))
        clipped = log_ratio.clamp(log_low, log_high).exp()
        too_high, too_low = fixed > log_high, fixed < log_low
        is_clipped = (too_high & (advantages > 0)) | (too_low & (advantages < 0))
        return LossOutput(
            loss=-(advantages * capped).minimum(advantages * clipped),
            metrics={"is_clipped": is_clipped, "ratio_capped": fixed > log_cap},
        )
