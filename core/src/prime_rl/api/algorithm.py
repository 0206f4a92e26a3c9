"""The algorithm contract: the episodes of a group in, per-token credit out."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from prime_rl.api.plugin import Plugin
from prime_rl.configs.frozen import FrozenModelConfig
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
    trace: int = 0
    """Number of that trace in its episode; a trace whose history was rewritten has several
    branches."""
    roles: Sequence[str] = ()
    """Role of the message whose content the token belongs to; "" for what the template writes
    around it. Empty unless the algorithm's needs ask for roles, and where the renderer does not
    say what is content."""

    @property
    def trainable_tokens(self) -> int:
        """Number of tokens that train."""
        return self.mask.count(True)


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
    task: Mapping[str, Any] = field(default_factory=dict)
    """The task's data, as the environment describes it."""


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
    """Who plays the episodes. frozen: the model of `Algorithm.teacher`; they never grow stale, and
    only the component ce can learn from them."""
    loss_aggregation: Literal["token", "prompt"] = "token"
    """What the rl weights add up to; the sources with rl tokens must agree."""
    reference: Literal["none", "teacher", "policy"] = "none"
    """Who gives the reference log-probabilities of tokens with ref_kl weights: the model of
    `Algorithm.teacher`, or the policy as it is when the batch ships."""
    components: frozenset[str] = field(default_factory=lambda: frozenset({"rl"}))
    """Those of rl, ce, ref_kl that its credit uses."""
    roles: bool = False
    """It reads `Branch.roles`."""
    min_group_size: int = 1
    """Fewest episodes of a group that can give credit."""
    agents: frozenset[str] = frozenset()
    """Agents that its settings name; the environment must have them."""


ReferenceContext = Sequence[int] | Sequence[Mapping[str, str]]
"""Token ids, or messages with `role` and `content`; what stands before a branch that is scored."""


class Algorithm(Plugin):
    """Turns rewards into credit. The trainer knows nothing about it."""

    requirements: ClassVar[AlgorithmNeeds] = AlgorithmNeeds()

    @abstractmethod
    def score_group(self, group: Group) -> list[list[Credit]]:
        """Credit for every branch of every episode, in the order given.

        Episodes that failed are part of the group; what they contribute is the algorithm's choice
        and belongs into its docstring.
        """

    @property
    def teacher(self) -> FrozenModelConfig | None:
        """The frozen model its settings name."""
        return None

    def reference_context(self, branch: Branch, task: Mapping[str, Any]) -> ReferenceContext:
        """What the reference is shown before the branch, beyond what the policy saw.

        Asked for branches with ref_kl weights. Messages are rendered as the run renders messages.
        Raises ValueError when the task lacks what is needed.
        """
        return ()

    def state_dict(self) -> dict[str, Any]:
        """What must survive a restart, as plain JSON-like values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if state:
            raise ValueError(f"{type(self).__name__} has no state, found {sorted(state)}")
