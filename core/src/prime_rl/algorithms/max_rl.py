"""Mean-normalised advantages: rare successes weigh more than frequent ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prime_rl.algorithms.outcomes import (
    OutcomeConfig,
    counted_reward,
    counting_episodes,
    even_credit,
    mean_reward,
)
from prime_rl.api.algorithm import Algorithm, AlgorithmNeeds, Credit, Episode, Group

SMALLEST_SHARE = 1e-9
"""A mean below this share of the largest reward is the rounding noise of rewards that cancel; with
rewards of one sign the share is at least 1 / episodes."""


class MaxRLConfig(OutcomeConfig):
    """Settings of max_rl."""

    type: Literal["max_rl"] = "max_rl"
    """Name of the algorithm."""


class MaxRL(Algorithm):
    """A_i = (r_i - m) / m, with m the mean reward of the episodes that count; 0 where m <= 0.

    With rewards 0 and 1, a success among n episodes with k successes gets n / k - 1 and a failure
    -1. Failed episodes never train. They leave the group before the mean is taken (or take the
    group with them, `failed`); so do truncated ones with `truncated = "exclude"`. A group with
    fewer than two episodes left gives no credit.
    """

    Config = MaxRLConfig
    requirements = AlgorithmNeeds(min_group_size=2)

    def score_group(self, group: Group) -> list[list[Credit]]:
        """See Algorithm.score_group. Episodes that do not count get credit without advantages."""
        return [
            [even_credit(branch, advantage) for branch in episode.branches]
            for episode, advantage in zip(
                group.episodes, self.advantages(group.episodes), strict=True
            )
        ]

    def advantages(self, episodes: Sequence[Episode]) -> list[float | None]:
        """One number per episode; None for episodes that do not count."""
        counting = counting_episodes(episodes, self.config)
        if len(counting) < 2:
            return [None] * len(episodes)
        rewards = [counted_reward(e.reward, e, self.config) for e in counting]
        mean = mean_reward(rewards)
        is_usable = mean > 0 and mean >= SMALLEST_SHARE * max(map(abs, rewards))
        by_id = {
            id(e): (r - mean) / mean if is_usable else 0.0
            for e, r in zip(counting, rewards, strict=True)
        }
        return [by_id.get(id(episode)) for episode in episodes]
