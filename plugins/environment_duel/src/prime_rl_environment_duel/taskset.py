"""The verifiers task set: one task per size of the pile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Self

import verifiers.v1 as vf
from pydantic import Field, model_validator

from prime_rl_environment_duel.rules import best_move


class DuelData(vf.TaskData):
    """One game to play."""

    stones: int
    """Stones in the pile at the start."""


class DuelTask(vf.Task[DuelData]):
    """A game; who plays it and what it is worth is the environment's."""


class DuelConfig(vf.TasksetConfig):
    """Which piles."""

    min_stones: int = Field(default=1, ge=1)
    """Smallest pile."""
    max_stones: int = Field(default=15, ge=1, le=999)
    """Largest pile."""
    only_won: bool = False
    """Leave out the piles that the player who begins loses against perfect play."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.min_stones > self.max_stones:
            raise ValueError(f"min_stones={self.min_stones} is above max_stones={self.max_stones}")
        return self


class DuelTaskset(vf.Taskset[DuelTask, DuelConfig]):
    """Every pile once, smallest first."""

    def load(self) -> Iterator[DuelTask]:
        for stones in range(self.config.min_stones, self.config.max_stones + 1):
            if best_move(stones) is not None or not self.config.only_won:
                data = DuelData(name=f"{stones} stones", stones=stones)
                yield DuelTask(data, self.config.task)
