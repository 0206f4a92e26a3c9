"""What the algorithms share: which episodes count, their rewards, and one advantage as credit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from prime_rl.api.algorithm import Branch, Credit, Episode
from prime_rl.configs.base import PluginConfig


class OutcomeConfig(PluginConfig):
    """What episodes contribute that were cut or failed."""

    truncated: Literal["keep", "zero", "exclude"] = "keep"
    """Episodes cut by a length limit. keep: their reward counts as it is. zero: it counts as 0.
    exclude: they are left out of baseline and training."""
    failed: Literal["exclude", "drop_group"] = "exclude"
    """Episodes that ended in an error or a time-out. exclude: they are left out of baseline and
    training. drop_group: the whole group is."""


def counting_episodes(episodes: Sequence[Episode], config: OutcomeConfig) -> list[Episode]:
    """The episodes that train and move the baseline, in the order given."""
    scored = [e for e in episodes if e.outcome in ("completed", "truncated")]
    if config.failed == "drop_group" and len(scored) < len(episodes):
        return []
    if config.truncated == "exclude":
        return [episode for episode in scored if episode.outcome != "truncated"]
    return scored


def counted_reward(reward: float, episode: Episode, config: OutcomeConfig) -> float:
    """`reward`, or 0 where the episode was cut and that counts as 0."""
    return 0.0 if config.truncated == "zero" and episode.outcome == "truncated" else reward


def mean_reward(rewards: Sequence[float]) -> float:
    """The mean; of equal rewards exactly that reward: no advantages out of rounding noise."""
    if min(rewards) == max(rewards):
        return rewards[0]
    return sum(rewards) / len(rewards)


def even_credit(branch: Branch, advantage: float | None, weight: float | None = None) -> Credit:
    """The same advantage, and rl weight, on every token that trains. None: no credit at all."""
    if advantage is None:
        return Credit()
    advantages = [advantage if trains else 0.0 for trains in branch.mask]
    if weight is None:
        return Credit(advantages=advantages)
    return Credit(
        advantages=advantages,
        rl_weights=[weight if trains else 0.0 for trains in branch.mask],
    )
