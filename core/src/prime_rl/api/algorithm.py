"""The algorithm contract: the episodes of a group in, per-token credit out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from prime_rl.api.plugin import Plugin
from prime_rl.wire.records import EpisodeOutcome


@dataclass(frozen=True)
class Branch:
    """One root-to-leaf path of an episode; it becomes one training sample.

    All lists have one entry per token.
    """

    agent: str
    """Name of the agent that acted."""
    token_ids: Sequence[int]
    mask: Sequence[bool]
    """True where the trained policy sampled the token and no earlier branch trains it."""
    reward: float
    """Reward of the trace the branch belongs to."""

    @property
    def trainable_tokens(self) -> int:
        """Number of tokens that train."""
        return sum(self.mask)


@dataclass(frozen=True)
class Episode:
    """One finished run of an environment."""

    id: str
    outcome: EpisodeOutcome
    reward: float
    """Mean reward of the trainable traces."""
    branches: Sequence[Branch]
    input_tokens: int = 0
    turns: int = 1

    @property
    def trainable_tokens(self) -> int:
        """Number of tokens that train, over all branches."""
        return sum(branch.trainable_tokens for branch in self.branches)


@dataclass(frozen=True)
class Group:
    """The episodes of one task."""

    env_name: str
    task_key: str
    episodes: Sequence[Episode]


@dataclass(frozen=True)
class Credit:
    """Per-token credit of one branch. None means: the component has no tokens here."""

    advantages: Sequence[float] | None = None
    rl_weights: Sequence[float] | None = None
    """None with advantages set: 1.0 on every masked-in token."""
    ce_weights: Sequence[float] | None = None
    ref_kl_weights: Sequence[float] | None = None


@dataclass(frozen=True)
class AlgorithmNeeds:
    """What an algorithm asks of the run; checked before any process starts."""

    sampled_by: Literal["policy", "frozen", "any"] = "policy"
    loss_aggregation: Literal["token", "prompt"] = "token"
    reference: bool = False
    components: frozenset[str] = field(default_factory=lambda: frozenset({"rl"}))


class Algorithm(Plugin):
    """Turns rewards into credit. The trainer knows nothing about it."""

    requirements: ClassVar[AlgorithmNeeds] = AlgorithmNeeds()

    @abstractmethod
    def score_group(self, group: Group) -> list[list[Credit]]:
        """Credit for every branch of every episode, in the order given.

        Episodes that failed are part of the group; what they contribute is the algorithm's choice
        and belongs into its docstring.
        """

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as plain JSON-like values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, found {sorted(state)}")
