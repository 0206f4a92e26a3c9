"""Settings of the CISPO loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prime_rl.configs.base import PluginConfig


class CISPOConfig(PluginConfig):
    """Policy gradient whose tokens are weighted by clipped, constant importance ratios."""

    type: Literal["cispo"] = "cispo"
    """Name of the loss."""
    ratio_low: float = Field(0.0, ge=0, le=1)
    """Smallest weight: the importance ratio p_trainer / p_sampler is raised to it; 0: off."""
    ratio_high: float = Field(5.0, ge=1, le=1e6)
    """Largest weight: the importance ratio is lowered to it."""
