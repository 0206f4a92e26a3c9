"""GRPO for agents that work for each other: some compared inside their episode, others across it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import Field

from prime_rl.algorithms.outcomes import (
    OutcomeConfig,
    counted_reward,
    counting_episodes,
    even_credit,
    mean_reward,
)
from prime_rl.api.algorithm import Algorithm, AlgorithmNeeds, Credit, Episode, Group
from prime_rl.configs.base import PluginConfig

Baselines = dict[str, float]
"""Agent -> mean reward of its traces; agents with a single trace are missing."""


class HierarchicalGRPOConfig(OutcomeConfig):
    """Settings of hierarchical_grpo."""

    type: Literal["hierarchical_grpo"] = "hierarchical_grpo"
    """Name of the algorithm."""
    episode_agents: list[str] = Field(["solver"], min_length=1)
    """Agents whose traces are compared inside their episode; all others across the group."""


class HierarchicalGRPO(Algorithm):
    """A = r - b of the trace's agent, b the mean reward of that agent's traces

        in the same episode    for agents in `episode_agents`
        in the whole group     for all others

    A proposer plays one trace per episode and is compared with the proposers of its group; the
    solvers of its problem are compared with each other, because problems differ between episodes.
    An agent with a single trace to compare has no baseline and gets no credit. A trace counts once,
    however many branches it has. Failed episodes never train. They leave before the baselines are
    taken (or take the group with them, `failed`); so do truncated ones with
    `truncated = "exclude"`.
    """

    Config = HierarchicalGRPOConfig

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.requirements = AlgorithmNeeds(agents=frozenset(self.config.episode_agents))  # type: ignore[misc]

    def score_group(self, group: Group) -> list[list[Credit]]:
        """See Algorithm.score_group. Branches without a baseline get credit without advantages."""
        counting = counting_episodes(group.episodes, self.config)
        ids = {id(episode) for episode in counting}
        across = self._baselines(counting)
        return [
            self._credits(episode, across, self._baselines([episode]))
            if id(episode) in ids
            else [Credit() for _ in episode.branches]
            for episode in group.episodes
        ]

    def _credits(self, episode: Episode, across: Baselines, inside: Baselines) -> list[Credit]:
        credits = []
        for branch in episode.branches:
            is_inside = branch.agent in self.config.episode_agents
            baseline = (inside if is_inside else across).get(branch.agent)
            reward = counted_reward(branch.reward, episode, self.config)
            credits.append(even_credit(branch, None if baseline is None else reward - baseline))
        return credits

    def _baselines(self, episodes: Iterable[Episode]) -> Baselines:
        rewards: dict[str, list[float]] = {}
        for episode in episodes:
            for agent, found in trace_rewards(episode).items():
                rewards.setdefault(agent, []).extend(
                    counted_reward(reward, episode, self.config) for reward in found
                )
        return {agent: mean_reward(sorted(r)) for agent, r in rewards.items() if len(r) > 1}


def trace_rewards(episode: Episode) -> dict[str, Sequence[float]]:
    """Agent -> rewards of its traces that train."""
    traces: dict[str, dict[int, float]] = {}
    for branch in episode.branches:
        if any(branch.mask):
            traces.setdefault(branch.agent, {})[branch.trace] = branch.reward
    return {agent: list(found.values()) for agent, found in traces.items()}
