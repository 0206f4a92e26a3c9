"""Settings of the IPO loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prime_rl.configs.base import PluginConfig


class IPOConfig(PluginConfig):
    """Importance-weighted policy gradient that drops tokens whose probability moved too far."""

    former = {
        "ipo_threshold": "write `.eps` instead",
        "dppo_mask_low": "remove it: the mask has two equal sides, `.eps`",
        "dppo_mask_high": "remove it: the mask has two equal sides, `.eps`",
        "kl_tau": "remove it: the loss has no KL term",
    }

    type: Literal["ipo"] = "ipo"
    """Name of the loss."""
    eps: float = Field(0.3, gt=0, le=1)
    """Largest change of a token's probability, |p_trainer - p_sampler|; beyond it the token is
    dropped."""
    adv_tau: float = Field(1.0, gt=0, le=1e6)
    """Factor on the advantages."""
    max_importance_ratio: float = Field(1e4, gt=0, le=1e6)
    """Bound of the importance ratio p_trainer / p_sampler of kept tokens."""
