"""Settings of the PPO loss."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs.base import PluginConfig


class PPOConfig(PluginConfig):
    """The clipped surrogate objective against the probabilities of the sampler."""

    type: Literal["ppo"] = "ppo"
    """Name of the loss."""
    ratio_low: float = Field(0.8, ge=0, le=1)
    """Below this importance ratio p_trainer / p_sampler, a token with a negative advantage has no
    gradient; 0: off."""
    ratio_high: float = Field(1.2, ge=1, le=1e6)
    """Above this importance ratio, a token with a positive advantage has no gradient."""
    max_importance_ratio: float = Field(1e4, ge=1, le=1e6)
    """Bound of the importance ratio where it is not clipped: tokens with a negative advantage."""

    @model_validator(mode="after")
    def _bound_lies_above_the_band(self) -> Self:
        if self.max_importance_ratio <= self.ratio_high:
            where = "below" if self.max_importance_ratio < self.ratio_high else "equal to"
            raise ValueError(
                f"max_importance_ratio {self.max_importance_ratio:g} is {where} ratio_high "
                f"{self.ratio_high:g}, expected a larger one: raise it, or lower ratio_high"
            )
        return self
