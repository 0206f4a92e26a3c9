"""Group-relative advantages: each episode against the mean reward of its group."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, model_validator

from prime_rl.algorithms.outcomes import (
    OutcomeConfig,
    counted_reward,
    counting_episodes,
    even_credit,
    mean_reward,
)
from prime_rl.api.algorithm import Algorithm, AlgorithmNeeds, Credit, Episode, Group
from prime_rl.configs.base import BaseConfig, PluginConfig


class LinearLengthPenaltyConfig(BaseConfig):
    """Takes up to `output + input + turns` of the group's mean reward from the longest episode. Where
    that mean is negative it gives instead of taking: longer episodes are then rewarded."""

    type: Literal["linear"] = "linear"
    output: float = Field(0.25, ge=0, le=1e6)
    """Share for sampled tokens, relative to the group's longest episode."""
    input: float = Field(0.1, ge=0, le=1e6)
    """Share for input tokens, relative to the group's largest."""
    turns: float = Field(0.1, ge=0, le=1e6)
    """Share for turns, relative to the group's most."""


class OverlongConfig(BaseConfig):
    """Graded penalty for episodes that come near a length limit."""

    max_tokens: int = Field(ge=1)
    """Sampled tokens from which on the penalty is 1."""
    cache_tokens: int = Field(ge=1)
    """Width of the ramp below `max_tokens`."""

    @model_validator(mode="after")
    def _ramp_begins_at_a_length(self) -> Self:
        if self.cache_tokens > self.max_tokens:
            raise ValueError(
                f"cache_tokens {self.cache_tokens} is above max_tokens {self.max_tokens}, so that an "
                "episode of no tokens would be penalised; lower it or raise max_tokens"
            )
        return self


class GRPOConfig(OutcomeConfig):
    """Settings of grpo."""

    length_penalty: LinearLengthPenaltyConfig | None = None
    """Take a share of the group's mean reward from longer episodes, before the baseline. Meant for
    rewards whose mean is not negative: a negative mean rewards length."""
    length_weighted_baseline: bool = False
    """Weight each reward in the baseline by its episode's trainable tokens."""
    loss_aggregation: Literal["token", "prompt"] = "token"
    """token: all trainable tokens count alike. prompt: every group counts once."""
    overlong: OverlongConfig | None = None
    """Graded length penalty; None: none."""


class GRPO(Algorithm):
    """A_i = r_i - b, with b the mean reward of the episodes that count; no division by a spread.

    Failed episodes never train. They leave the group before the baseline is taken (or take the
    group with them, `failed`); so do truncated ones with `truncated = "exclude"`. A group with
    fewer than two episodes left has no baseline and gives no credit.
    """

    Config = GRPOConfig
    requirements = AlgorithmNeeds(min_group_size=2)

    def __init__(self, config: PluginConfig) -> None:
        super().__init__(config)
        self.requirements = dataclasses.replace(  # type: ignore[misc]
            type(self).requirements, loss_aggregation=self.config.loss_aggregation
        )

    def score_group(self, group: Group) -> list[list[Credit]]:
        """See Algorithm.score_group. Episodes that do not count get credit without advantages.

        Aggregated by prompt, the tokens of a group that have a signal weigh 1 together.
        """
        advantages = self.advantages(group.episodes)
        tokens = sum(
            episode.trainable_tokens
            for episode, advantage in zip(group.episodes, advantages, strict=True)
            if advantage
        )
        weight = 1.0 / tokens if self.config.loss_aggregation == "prompt" and tokens else None
        return [
            [even_credit(branch, advantage, weight) for branch in episode.branches]
            for episode, advantage in zip(group.episodes, advantages, strict=True)
        ]

    def advantages(self, episodes: Sequence[Episode]) -> list[float | None]:
        """One number per episode; None for episodes that do not count."""
        counting = counting_episodes(episodes, self.config)
        if len(counting) < 2:
            return [None] * len(episodes)
        rewards = self._shaped_rewards(counting)
        baseline = self._baseline(counting, rewards)
        by_id = {id(e): r - baseline for e, r in zip(counting, rewards, strict=True)}
        return [by_id.get(id(episode)) for episode in episodes]

    def _shaped_rewards(self, episodes: Sequence[Episode]) -> list[float]:
        """Rewards after the length rules.

        linear: penalty_i = mean(r) * (output * out_i / max(out) + input * in_i / max(in)
                + turns * turns_i / max(turns))
        overlong: penalty_i = clamp((out_i - (max_tokens - cache_tokens)) / cache_tokens, 0, 1)
        """
        rewards = [counted_reward(e.reward, e, self.config) for e in episodes]
        outputs = [episode.trainable_tokens for episode in episodes]
        if (linear := self.config.length_penalty) is not None:
            mean = sum(rewards) / len(rewards)
            shares = [
                linear.output * output + linear.input * prompt + linear.turns * turns
                for output, prompt, turns in zip(
                    _relative(outputs),
                    _relative([episode.input_tokens for episode in episodes]),
                    _relative([episode.turns for episode in episodes]),
                    strict=True,
                )
            ]
            rewards = [r - mean * share for r, share in zip(rewards, shares, strict=True)]
        if (overlong := self.config.overlong) is not None:
            rewards = [
                r - overlong_penalty(tokens, overlong)
                for r, tokens in zip(rewards, outputs, strict=True)
            ]
        return rewards

    def _baseline(self, episodes: Sequence[Episode], rewards: Sequence[float]) -> float:
        """mean(r), or sum(L_i r_i) / sum(L_i) with L_i the trainable tokens: then the advantages
        summed over tokens are zero."""
        if self.config.length_weighted_baseline and min(rewards) < max(rewards):
            weights = [episode.trainable_tokens for episode in episodes]
            if sum(weights):
                products = (w * r for w, r in zip(weights, rewards, strict=True))
                return sum(products) / sum(weights)
        return mean_reward(rewards)


def overlong_penalty(tokens: int, config: OverlongConfig) -> float:
    """0 up to max_tokens - cache_tokens, then linearly to 1 at max_tokens."""
    excess = tokens - (config.max_tokens - config.cache_tokens)
    return min(1.0, max(0.0, excess / config.cache_tokens))


def _relative(values: Sequence[int]) -> list[float]:
    largest = max(values)
    return [value / largest if largest else 0.0 for value in values]
