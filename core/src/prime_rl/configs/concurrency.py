"""How many episodes run at once."""

from __future__ import annotations

from pydantic import Field, model_validator

from prime_rl.configs.base import BaseConfig

FIXED_INFLIGHT = 128
"""Episodes in flight where neither the recipe nor the engines say how many."""
LARGEST_INFLIGHT = 1024
"""Most episodes in flight where the ceiling adapts and the recipe says nothing."""


class ConcurrencyConfig(BaseConfig):
    """How many episodes run at once."""

    adaptive: bool = True
    """Follow the engines' metrics: more episodes while caches have room, fewer when they overflow or
    requests pile up. Off, or where engines have no metrics: a fixed number."""
    initial_inflight: int | None = Field(None, ge=1)
    """Episodes in flight at the start, and all along where the number is fixed. None: what the
    engines' caches hold at full length; where the number is fixed, max_inflight, or 128."""
    min_inflight: int = Field(1, ge=1)
    """Fewest episodes the ceiling goes down to; never below the largest group_size."""
    max_inflight: int | None = Field(None, ge=1)
    """Most episodes in flight; None: 1024 where the number adapts."""
    ramp_window_s: float = Field(5.0, ge=0)
    """Seconds in which the episodes in flight grow by at most a tenth of max_inflight, but at least
    64 or one group; 0: at once."""

    @model_validator(mode="after")
    def _bounds_fit(self) -> ConcurrencyConfig:
        if self.max_inflight is not None:
            for name in ("initial_inflight", "min_inflight"):
                value = getattr(self, name)
                if value is not None and value > self.max_inflight:
                    raise ValueError(
                        f"{name} {value} is above max_inflight {self.max_inflight}; "
                        "lower it or raise max_inflight"
                    )
        if self.initial_inflight is not None and self.initial_inflight < self.min_inflight:
            raise ValueError(
                f"initial_inflight {self.initial_inflight} is below min_inflight "
                f"{self.min_inflight}; raise it or lower min_inflight"
            )
        return self

    @property
    def fixed_inflight(self) -> int:
        """Episodes in flight where nothing adapts."""
        return self.initial_inflight or self.max_inflight or FIXED_INFLIGHT

    @property
    def largest_inflight(self) -> int:
        """Most episodes in flight, however the ceiling comes about."""
        if self.max_inflight is not None:
            return self.max_inflight
        return max(LARGEST_INFLIGHT if self.adaptive else 0, self.fixed_inflight)
