"""The orchestrator's part of a checkpoint: data order, algorithms, counters, half-shipped groups."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.errors import CheckpointError
from prime_rl.orchestrator.columns import ReferenceView, SampleColumns
from prime_rl.orchestrator.group import EpisodeFigures, ScoredEpisode, ScoredGroup
from prime_rl.wire import RoutedExperts, SamplingMask

STATE_NAME = "state.json"
LEFTOVER_NAME = "leftover.msgpack"
STATE_VERSION = 1


class _StoredSample(msgspec.Struct):
    # Fields with a default are absent from older checkpoints.
    length: int
    streams: dict[str, bytes]
    env_name: str
    trace_id: str
    branch_index: int
    routed_experts: RoutedExperts | None
    sampling_mask: SamplingMask | None
    reference_view: ReferenceView | None = None


class _StoredEpisode(msgspec.Struct):
    figures: dict[str, Any]
    samples: list[_StoredSample]


class _StoredGroup(msgspec.Struct):
    group_id: int
    source: str
    version: int
    has_variance: bool
    episodes: list[_StoredEpisode]


@dataclasses.dataclass(frozen=True)
class OrchestratorState:
    """As of "batch `step` has shipped"."""

    step: int
    source: dict[str, Any]
    algorithms: dict[str, dict[str, Any]]
    counters: dict[str, int]
    leftover: bytes
    """Encoded episodes of groups of which a part has shipped."""

    def write(self, folder: Path) -> None:
        """Fill the component's folder."""
        values = {
            "version": STATE_VERSION,
            "step": self.step,
            "source": self.source,
            "algorithms": self.algorithms,
            "counters": self.counters,
        }
        (folder / STATE_NAME).write_text(json.dumps(values))
        (folder / LEFTOVER_NAME).write_bytes(self.leftover)

    @classmethod
    def read(cls, folder: Path) -> OrchestratorState:
        """Raises CheckpointError when the folder is not the orchestrator's part of a checkpoint."""
        try:
            values = json.loads((folder / STATE_NAME).read_text())
            leftover = (folder / LEFTOVER_NAME).read_bytes()
            found = values.pop("version")
            state = cls(leftover=leftover, **values)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{folder} cannot be read: {error}") from error
        if found != STATE_VERSION:
            raise CheckpointError(
                f"{folder} has format {found}, this version of prime-rl reads {STATE_VERSION}"
            )
        return state


def encode_leftover(groups: Sequence[ScoredGroup]) -> bytes:
    """The live episodes of each group that have not shipped."""
    stored = [
        _StoredGroup(
            group_id=group.group_id,
            source=group.source,
            version=group.version,
            has_variance=group.has_variance,
            episodes=[
                _StoredEpisode(
                    dataclasses.asdict(episode.figures),
                    [
                        _StoredSample(**{f: getattr(s, f) for f in _StoredSample.__struct_fields__})
                        for s in episode.samples
                    ],
                )
                for episode in group.episodes[group.shipped :]
            ],
        )
        for group in groups
    ]
    return msgspec.msgpack.encode(stored)


def decode_leftover(data: bytes) -> list[ScoredGroup]:
    """What `encode_leftover` wrote; raises CheckpointError for anything else."""
    try:
        stored = msgspec.msgpack.decode(data, type=list[_StoredGroup])
    except msgspec.DecodeError as error:
        raise CheckpointError(f"the checkpoint's unfinished groups are damaged: {error}") from error
    return [
        ScoredGroup(
            group_id=group.group_id,
            source=group.source,
            version=group.version,
            episodes=[
                ScoredEpisode(
                    EpisodeFigures(**episode.figures),
                    [SampleColumns(**msgspec.structs.asdict(s)) for s in episode.samples],
                )
                for episode in group.episodes
            ],
            has_variance=group.has_variance,
        )
        for group in stored
    ]
