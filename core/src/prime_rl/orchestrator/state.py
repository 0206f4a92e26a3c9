"""The orchestrator's part of a checkpoint: data order, algorithms, counters, half-shipped groups."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.errors import CheckpointError
from prime_rl.orchestrator.columns import STREAM_ITEM_BYTES, ReferenceView, SampleColumns
from prime_rl.orchestrator.group import EpisodeFigures, ScoredEpisode, ScoredGroup
from prime_rl.orchestrator.stored import OTHER_WAY, NotNegative, as_stored
from prime_rl.wire import RoutedExperts, SamplingMask

STATE_NAME = "state.json"
LEFTOVER_NAME = "leftover.msgpack"
STATE_VERSION = 1


class _StoredCounters(msgspec.Struct, forbid_unknown_fields=True):
    total_tokens: NotNegative = 0
    total_samples: NotNegative = 0
    total_episodes: NotNegative = 0


class _StoredState(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    step: NotNegative
    source: dict[str, Any]
    algorithms: dict[str, dict[str, Any]]
    counters: _StoredCounters


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
    origin: str = "the checkpoint"
    """Where it was read, for messages."""

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
        path = folder / STATE_NAME
        try:
            values = json.loads(path.read_text())
            leftover = (folder / LEFTOVER_NAME).read_bytes()
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} cannot be read: {error}. {OTHER_WAY}") from error
        if isinstance(values, dict) and values.get("version", STATE_VERSION) != STATE_VERSION:
            raise CheckpointError(
                f"{folder} has format {values['version']!r}, this version of prime-rl reads "
                f"{STATE_VERSION}"
            )
        stored = as_stored(values, _StoredState, str(path))
        return cls(
            step=stored.step,
            source=stored.source,
            algorithms=stored.algorithms,
            counters=msgspec.structs.asdict(stored.counters),
            leftover=leftover,
            origin=str(path),
        )


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
        return _groups(msgspec.msgpack.decode(data, type=list[_StoredGroup]))
    except (msgspec.DecodeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the unfinished groups ({LEFTOVER_NAME}) are damaged: {error}. {OTHER_WAY}"
        ) from error


def _groups(stored: Sequence[_StoredGroup]) -> list[ScoredGroup]:
    return [
        ScoredGroup(
            group_id=group.group_id,
            source=group.source,
            version=group.version,
            episodes=[
                ScoredEpisode(
                    EpisodeFigures(**episode.figures),
                    [_columns(sample) for sample in episode.samples],
                )
                for episode in group.episodes
            ],
            has_variance=group.has_variance,
        )
        for group in stored
    ]


def _columns(sample: _StoredSample) -> SampleColumns:
    """Raises ValueError when a stream has another length than its sample."""
    for name, data in sample.streams.items():
        if len(data) != sample.length * STREAM_ITEM_BYTES.get(name, -1):
            raise ValueError(
                f"stream {name!r} of a sample of {sample.length} tokens has {len(data)} bytes"
            )
    return SampleColumns(**msgspec.structs.asdict(sample))
