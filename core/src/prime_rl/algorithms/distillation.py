"""What the distilling algorithms share: which episodes teach, and the same weight on their tokens."""

from __future__ import annotations

from typing import Literal

from prime_rl.algorithms.outcomes import OutcomeConfig, counting_episodes
from prime_rl.api.algorithm import Branch, Group


class DistillationConfig(OutcomeConfig):
    """Which episodes are learned from. Rewards play no part."""

    truncated: Literal["keep", "exclude"] = "keep"
    """Episodes cut by a length limit. keep: their tokens are learned like others. exclude: not."""
    failed: Literal["exclude", "drop_group"] = "exclude"
    """Episodes that ended in an error or a time-out. exclude: they are left out. drop_group: the
    whole group is."""


def teaching_weights(group: Group, config: OutcomeConfig) -> list[list[list[float] | None]]:
    """Per episode and branch: 1.0 on every token of the mask; None where the episode is left out."""
    teaching = {id(episode) for episode in counting_episodes(group.episodes, config)}
    return [
        [_ones(branch) if id(episode) in teaching else None for branch in episode.branches]
        for episode in group.episodes
    ]


def _ones(branch: Branch) -> list[float]:
    return [1.0 if trains else 0.0 for trains in branch.mask]
