"""Role-conditioned advantages: each agent against the running mean of its own rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from prime_rl.algorithms.outcomes import (
    OutcomeConfig,
    counted_reward,
    counting_episodes,
    even_credit,
)
from prime_rl.api.algorithm import Algorithm, Credit, Episode, Group
from prime_rl.configs.base import PluginConfig


class RAEConfig(OutcomeConfig):
    """Settings of rae."""

    type: Literal["rae"] = "rae"
    """Name of the algorithm."""
    decay: float = Field(0.95, ge=0, lt=1)
    """Share of an agent's baseline that one more episode leaves in place."""


class RAE(Algorithm):
    """A = r - b of the agent that acted, with b as it was before the group.

    r is the reward of the branch. Then b moves once for every episode in which the agent has tokens
    that train, as if each had brought the group's mean:

        b <- decay^n * b + (1 - decay^n) * mean(r)      n episodes; b starts at 0

    With n = 1 this is b <- decay * b + (1 - decay) * r. Neither credit nor state depends on the
    order of the episodes in their group, and a group of one episode trains. Branches of an agent in
    one episode count as one reward, their mean. Failed episodes neither train nor move a baseline
    (or the whole group does not, `failed`); so do truncated ones with `truncated = "exclude"`.
    """

    Config = RAEConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self._baselines: dict[str, float] = {}

    def score_group(self, group: Group) -> list[list[Credit]]:
        """See Algorithm.score_group. Episodes that do not count get credit without advantages."""
        counting = counting_episodes(group.episodes, self.config)
        ids = {id(episode) for episode in counting}
        credits = [
            self._credits(episode) if id(episode) in ids else [Credit() for _ in episode.branches]
            for episode in group.episodes
        ]
        self._move_baselines(counting)
        return credits

    def _credits(self, episode: Episode) -> list[Credit]:
        return [
            even_credit(
                branch,
                counted_reward(branch.reward, episode, self.config)
                - self._baselines.get(branch.agent, 0.0),
            )
            for branch in episode.branches
        ]

    def _move_baselines(self, episodes: Sequence[Episode]) -> None:
        rewards: dict[str, list[float]] = {}
        for episode in episodes:
            for agent, reward in agent_rewards(episode).items():
                counted = counted_reward(reward, episode, self.config)
                rewards.setdefault(agent, []).append(counted)
        for agent, found in rewards.items():
            kept = self.config.decay ** len(found)
            mean = math.fsum(found) / len(found)
            self._baselines[agent] = kept * self._baselines.get(agent, 0.0) + (1 - kept) * mean

    def state_dict(self) -> dict[str, Any]:
        """The baseline of every agent seen; nothing before the first group."""
        return {"baselines": dict(self._baselines)} if self._baselines else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the baselines. Raises ValueError when `state` is not what state_dict returns."""
        unknown = sorted(state.keys() - {"baselines"})
        if unknown:
            raise ValueError(f"rae: the state has {unknown}, expected only 'baselines'")
        baselines = state.get("baselines", {})
        if not isinstance(baselines, dict):
            raise ValueError(f"rae: baselines: found {baselines!r}, expected a table of numbers")
        for agent, value in baselines.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if not is_number or not math.isfinite(value):
                raise ValueError(
                    f"rae: the baseline of agent {agent!r} is {value!r}, expected a finite number"
                )
        self._baselines = {agent: float(value) for agent, value in baselines.items()}


def agent_rewards(episode: Episode) -> dict[str, float]:
    """Agent -> mean reward of its branches that train."""
    rewards: dict[str, list[float]] = {}
    for branch in episode.branches:
        if any(branch.mask):
            rewards.setdefault(branch.agent, []).append(branch.reward)
    return {agent: math.fsum(found) / len(found) for agent, found in rewards.items()}
