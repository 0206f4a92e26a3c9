"""Settings of the IcePop loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prime_rl.configs.base import PluginConfig


class IcePopConfig(PluginConfig):
    """Importance-weighted policy gradient on the tokens whose ratio lies inside a band."""

    type: Literal["icepop"] = "icepop"
    """Name of the loss."""
    ratio_low: float = Field(0.2, ge=0, le=1)
    """Smallest importance ratio p_trainer / p_sampler that is kept, inclusive; 0: no lower bound."""
    ratio_high: float = Field(5.0, ge=1, le=1e6)
    """Largest importance ratio that is kept, inclusive."""
    adv_tau: float = Field(1.0, gt=0, le=1e6)
    """Factor on the advantages."""
