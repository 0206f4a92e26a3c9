"""What the orchestrator knows about an episode once it is over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from prime_rl.wire import EpisodeOutcome, TrainingSample

Split = Literal["train", "eval"]


@dataclass(frozen=True)
class EpisodeRequest:
    """One episode to run."""

    split: Split
    source: str
    task_index: int
    """Position of the task in the source's selection."""
    group_id: int
    member: int
    """Number inside the group, from 0."""
    version: int
    """Policy version the group was dispatched with."""
    step: int
    """Step whose batch was being filled at dispatch."""


@dataclass(frozen=True)
class AgentTrace:
    """One agent's part of an episode."""

    id: str
    agent: str
    trainable: bool
    reward: float
    samples: Sequence[TrainingSample]
    """One per merged sequence; without advantages."""
    forks: int
    """Sequences beyond the first: how often the history was rewritten."""
    paths: Sequence[Sequence[Mapping[str, Any]]] = ()
    """Per sample the nodes of the record that its tokens come from."""


@dataclass(frozen=True)
class EpisodeResult:
    """One finished episode."""

    request: EpisodeRequest
    id: str
    outcome: EpisodeOutcome
    reward: float
    """Mean reward of the trainable traces."""
    traces: Sequence[AgentTrace]
    error: str = ""
    """Type and message of the last error, "" when there was none."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's own metrics, means over the trainable traces; and `reward/<agent>` where
    agents have names of their own."""
    input_tokens: int = 0
    output_tokens: int = 0
    turns: int = 0
    duration_s: float = 0.0
    end_version: int = 0
    """Policy version when the episode ended."""
    record: dict[str, Any] = field(default_factory=dict)
    """The environment's record, for the trace stream."""

    @property
    def failed(self) -> bool:
        """True when there is nothing that could be scored."""
        return self.outcome in ("error", "timeout", "cancelled")


def failed_result(
    request: EpisodeRequest, outcome: EpisodeOutcome, error: str, duration_s: float = 0.0
) -> EpisodeResult:
    """An episode of which nothing came back."""
    return EpisodeResult(
        request=request,
        id=f"{request.split}-{request.group_id}-{request.member}",
        outcome=outcome,
        reward=0.0,
        traces=(),
        error=error,
        duration_s=duration_s,
        end_version=request.version,
    )
