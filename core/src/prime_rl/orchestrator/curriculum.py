"""The curriculum of a source: which task comes next, by position or by how the policy does on it."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from typing import Annotated, Any, Protocol

import msgspec

from prime_rl.configs.curriculum import (
    AdvantageRangeConfig,
    DifficultyPoolConfig,
    StandardSamplerConfig,
)
from prime_rl.errors import CheckpointError, ConfigError
from prime_rl.orchestrator.stored import as_stored, is_damaged

UNSEEN = -1

RewardSums = dict[str, tuple[Annotated[int, msgspec.Meta(ge=1)], float]]
"""Task key -> number of rewards and their sum."""


class Sampler(Protocol):
    """Chooses the tasks of one source.

    A choice depends on its number, the settings and the state alone: the same state draws the same
    tasks, in any process.
    """

    def choose(self, number: int) -> int:
        """Index of the task for draw `number` of the source, from 0."""

    def observe(self, task_index: int, rewards: Sequence[float]) -> None:
        """Rewards of the scored episodes of one group of the task."""

    def metrics(self) -> dict[str, float]:
        """Figures of now."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there. Raises CheckpointError when it is not of this source."""


class StandardSampler:
    """Tasks in order, over and over."""

    def __init__(self, tasks: int) -> None:
        self._tasks = tasks

    def choose(self, number: int) -> int:
        """See Sampler.choose."""
        return number % self._tasks

    def observe(self, task_index: int, rewards: Sequence[float]) -> None:
        """Rewards change nothing."""

    def metrics(self) -> dict[str, float]:
        """None."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the number says it all."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Whatever another sampler left is not needed."""


class DifficultyPoolSampler:
    """Tasks at random, with replacement: P(task) = w(pool of task) / sum of w over all tasks.

    The pool of a task is the first whose `max_reward` is not below the mean reward of all its scored
    episodes; a task without any has the weight `unseen_weight`. Choice `n` uses randomness of its
    own, made of the seed, the source and `n`.
    """

    def __init__(self, config: DifficultyPoolConfig, label: str, keys: Sequence[str]) -> None:
        if len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(
                f"source {label!r}: difficulty_pool needs tasks with keys of their own, "
                f"{twice!r} occurs {keys.count(twice)} times"
            )
        self._config = config
        self._label = label
        self._keys = list(keys)
        self._bounds = [pool.max_reward for pool in config.pools]
        self._counts = [0] * len(keys)
        self._sums = [0.0] * len(keys)
        self._members: dict[int, list[int]] = {}
        self._fill()

    def _fill(self) -> None:
        """Put every task into its pool; members are sorted, so that the order of events leaves no
        trace in later choices."""
        self._members = {pool: [] for pool in range(UNSEEN, len(self._bounds))}
        for index in range(len(self._keys)):
            self._members[self._pool(index)].append(index)

    def _pool(self, index: int) -> int:
        if not self._counts[index]:
            return UNSEEN
        mean = self._sums[index] / self._counts[index]
        return min(bisect.bisect_left(self._bounds, mean), len(self._bounds) - 1)

    def _weight(self, pool: int) -> float:
        config = self._config
        return config.unseen_weight if pool == UNSEEN else config.pools[pool].weight

    def choose(self, number: int) -> int:
        """See Sampler.choose. Where every weight is 0, all tasks are equally likely."""
        draw = random.Random(f"{self._config.seed}/{self._label}/{number}")
        pools = list(self._members)
        weights = [self._weight(pool) * len(self._members[pool]) for pool in pools]
        if not any(weights):
            return draw.randrange(len(self._keys))
        return draw.choice(self._members[draw.choices(pools, weights)[0]])

    def observe(self, task_index: int, rewards: Sequence[float]) -> None:
        """See Sampler.observe."""
        if not rewards:
            return
        before = self._members[self._pool(task_index)]
        self._counts[task_index] += len(rewards)
        self._sums[task_index] += sum(rewards)
        after = self._members[self._pool(task_index)]
        if before is not after:
            del before[bisect.bisect_left(before, task_index)]
            bisect.insort(after, task_index)

    def metrics(self) -> dict[str, float]:
        """Tasks in each pool."""
        names = {pool: config.name for pool, config in enumerate(self._config.pools)}
        names[UNSEEN] = "unseen"
        return {names[pool]: len(members) for pool, members in self._members.items()}

    def state_dict(self) -> dict[str, Any]:
        """Task key -> number of rewards and their sum, of the tasks that have any."""
        return {
            "rewards": {
                key: [count, total]
                for key, count, total in zip(self._keys, self._counts, self._sums, strict=True)
                if count
            }
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See Sampler.load_state_dict. The state of another sampler: every task is unseen."""
        places = {key: index for index, key in enumerate(self._keys)}
        for key, (count, total) in self._stored_rewards(state).items():
            if key not in places:
                raise CheckpointError(
                    f"the checkpoint has rewards of task {key!r}, which source {self._label!r} "
                    "does not have; the task set has changed, or use resume.skip_dataloader = true"
                )
            self._counts[places[key]], self._sums[places[key]] = count, total
        self._fill()

    def _stored_rewards(self, state: dict[str, Any]) -> RewardSums:
        what = f"the state of the difficulty pools of source {self._label!r}"
        rewards = as_stored(state.get("rewards", {}), RewardSums, what)
        if not all(math.isfinite(total) for _, total in rewards.values()):
            raise is_damaged(what, "a sum of rewards is not finite", rewards)
        return rewards


def make_sampler(
    config: StandardSamplerConfig | DifficultyPoolConfig, label: str, keys: Sequence[str]
) -> Sampler:
    """The sampler of a source with these task keys."""
    if isinstance(config, DifficultyPoolConfig):
        return DifficultyPoolSampler(config, label, keys)
    return StandardSampler(len(keys))


def is_rejected(
    gates: Sequence[AdvantageRangeConfig], advantages: tuple[float, float] | None
) -> bool:
    """Whether some gate turns down a group with this smallest and largest advantage of a trainable
    token. A group without advantages (None) passes."""
    if advantages is None:
        return False
    smallest, largest = advantages
    return any(gate.reject_min <= smallest and largest <= gate.reject_max for gate in gates)
