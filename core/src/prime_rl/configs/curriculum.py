"""Which tasks of a source come next, and which groups may train: samplers and gates."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prime_rl.configs.base import BaseConfig, default_type


class StandardSamplerConfig(BaseConfig):
    """Tasks in the order of the source, over and over."""

    type: Literal["standard"] = "standard"


class PoolConfig(BaseConfig):
    """Tasks of similar difficulty."""

    name: str
    """Name in metrics."""
    max_reward: float
    """Largest running mean reward of its tasks; of the last pool: every larger one as well."""
    weight: float = Field(ge=0, le=1e6)
    """Weight of each of its tasks against the other tasks of the source."""


def _pools() -> list[PoolConfig]:
    return [
        PoolConfig(name="hard", max_reward=0.25, weight=0.2),
        PoolConfig(name="normal", max_reward=0.75, weight=1.0),
        PoolConfig(name="easy", max_reward=1.0, weight=0.2),
    ]


class DifficultyPoolConfig(BaseConfig):
    """Tasks at random, weighted by how well the policy does on them."""

    type: Literal["difficulty_pool"] = "difficulty_pool"
    pools: list[PoolConfig] = Field(default_factory=_pools, min_length=1)
    """Pools with ascending `max_reward`."""
    unseen_weight: float = Field(1.0, ge=0, le=1e6)
    """Weight of a task that has no reward yet."""
    seed: int = Field(42, ge=0)
    """Seed of the choice."""

    @model_validator(mode="after")
    def _pools_ascend(self) -> DifficultyPoolConfig:
        bounds = [pool.max_reward for pool in self.pools]
        if any(lower >= upper for lower, upper in zip(bounds, bounds[1:], strict=False)):
            raise ValueError(
                f"max_reward of the pools must ascend, found {', '.join(map(str, bounds))}"
            )
        names = [pool.name for pool in self.pools]
        if "unseen" in names or len(set(names)) < len(names):
            raise ValueError(
                f"pools need names of their own other than 'unseen', found {', '.join(names)}"
            )
        if not self.unseen_weight:
            raise ValueError("unseen_weight is 0: no task would ever be drawn; use a positive one")
        return self


SamplerConfig = Annotated[
    StandardSamplerConfig | DifficultyPoolConfig,
    Field(discriminator="type"),
    default_type("standard"),
]


class AdvantageRangeConfig(BaseConfig):
    """Rejects a group all of whose advantages lie in a range."""

    type: Literal["advantage_range"] = "advantage_range"
    reject_min: float = 0.0
    """Smallest advantage of the range."""
    reject_max: float = 0.0
    """Largest advantage of the range."""

    @model_validator(mode="after")
    def _range_is_one(self) -> AdvantageRangeConfig:
        if self.reject_min > self.reject_max:
            raise ValueError(
                f"reject_min {self.reject_min} is above reject_max {self.reject_max}; swap them"
            )
        return self
