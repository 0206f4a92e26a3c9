"""GRPO that also learns to predict what the environment answers."""

from __future__ import annotations

import bisect
import dataclasses
from array import array
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, field_validator

from prime_rl.algorithms.grpo import GRPO, GRPOConfig
from prime_rl.algorithms.outcomes import counting_episodes
from prime_rl.api.algorithm import AlgorithmNeeds, Branch, Credit, Episode, Group
from prime_rl.configs.problems import did_you_mean

ROLES = ("system", "user", "assistant", "tool")
"""Roles of messages."""


class EchoConfig(GRPOConfig):
    """Settings of echo; those of grpo and:"""

    type: Literal["echo"] = "echo"
    """Name of the algorithm."""
    alpha: dict[str, Annotated[float, Field(ge=0, le=1e6)]] = {"tool": 0.1}
    """Role -> ce weight of the content of its messages, after the first reply. Roles: system, user,
    assistant, tool."""

    @field_validator("alpha")
    @classmethod
    def _roles_exist(cls, alpha: dict[str, float]) -> dict[str, float]:
        for role in alpha:
            if role not in ROLES:
                hint = did_you_mean(role.lower(), ROLES)
                raise ValueError(
                    f"found the role {role!r}, expected one of {', '.join(ROLES)}.{hint}"
                )
        return alpha


class Echo(GRPO):
    """GRPO, plus cross-entropy with weight alpha[role] on the tokens that

    - stand after the first sampled token of the branch: answers to what the policy did, not the
      question it was asked,
    - nobody sampled, and
    - are content of a message with that role, not what the template writes around it.

    A token that an earlier branch of the episode holds after the same history counts there only. ce
    has a denominator of its own, so alpha is the strength of the mean answer token beside the mean
    sampled one. Episodes that count for the baseline count here too, and teach with equal rewards
    and alone as well; for all others see GRPO.
    """

    Config = EchoConfig
    requirements = AlgorithmNeeds(components=frozenset({"rl", "ce"}), roles=True)

    def score_group(self, group: Group) -> list[list[Credit]]:
        """See Algorithm.score_group."""
        counting = {id(episode) for episode in counting_episodes(group.episodes, self.config)}
        credits = super().score_group(group)
        return [
            self._with_answers(episode, branches) if id(episode) in counting else branches
            for episode, branches in zip(group.episodes, credits, strict=True)
        ]

    def _with_answers(self, episode: Episode, credits: Sequence[Credit]) -> list[Credit]:
        found = []
        earlier = SortedBranches()
        for branch, credit in zip(episode.branches, credits, strict=True):
            first = earlier.add(branch)
            weights = self._answer_weights(branch, first)
            found.append(dataclasses.replace(credit, ce_weights=weights) if weights else credit)
        return found

    def _answer_weights(self, branch: Branch, first: int) -> list[float] | None:
        """ce weights from token `first` on; None when no token has any."""
        if not branch.roles or not any(branch.mask):
            return None
        start = max(first, list(branch.mask).index(True))
        weights = [0.0] * len(branch.token_ids)
        for place in range(start, len(weights)):
            if not branch.mask[place]:
                weights[place] = self.config.alpha.get(branch.roles[place], 0.0)
        return weights if any(weights) else None


class SortedBranches:
    """Branches in the order of their tokens, so that the one that has most leading tokens in common
    with another stands right beside it: a history that is rewritten often gives many branches, and
    comparing each with each takes seconds for 32 of 20,000 tokens."""

    def __init__(self) -> None:
        self._keys: list[bytes] = []
        self._branches: list[Branch] = []

    def add(self, branch: Branch) -> int:
        """Number of leading tokens that some branch added before has in common with this one."""
        key = array("q", branch.token_ids).tobytes()
        place = bisect.bisect_left(self._keys, key)
        beside = self._branches[max(0, place - 1) : place + 1]
        self._keys.insert(place, key)
        self._branches.insert(place, branch)
        return max((shared_length(branch, other) for other in beside), default=0)


def shared_length(one: Branch, other: Branch) -> int:
    """Number of leading tokens that two branches have in common."""
    pairs = zip(one.token_ids, other.token_ids, strict=False)
    return next(
        (place for place, (a, b) in enumerate(pairs) if a != b),
        min(len(one.token_ids), len(other.token_ids)),
    )
