"""Reading a run's traces: episodes by index entry, annotations folded over them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.traces.index import STREAM_NAME, IndexEntry, read_index
from prime_rl.traces.lines import LineFollower

Folded = dict[str, dict[int, dict[str, list[Any]]]]
"""trace id -> branch index -> stream name -> one value per token."""


def read_episode(directory: Path, entry: IndexEntry) -> dict[str, Any]:
    """The record an index entry points to."""
    with (directory / STREAM_NAME).open("rb") as file:
        file.seek(entry.offset)
        record: dict[str, Any] = msgspec.json.decode(file.read(entry.length))
    return record


def read_episodes(directory: Path, source: str | None = None) -> Iterator[dict[str, Any]]:
    """Every stored episode in order of storage, of one source or of all."""
    for entry in read_index(directory):
        if source is None or entry.source == source:
            yield read_episode(directory, entry)


def fold_annotations(directory: Path) -> Folded:
    """All annotations together.

    The orchestrator's come first, then the other producers by name; inside a producer the newest
    line wins. A null never hides a number that is known.
    """
    folded: Folded = {}
    paths = sorted(
        (directory / "annotations").glob("*.jsonl"),
        key=lambda path: (path.stem != "orchestrator", path.stem),
    )
    for path in paths:
        for update in LineFollower(path).poll():
            branches = folded.setdefault(update["trace_id"], {})
            for branch in update["branches"]:
                _lay_over(branches.setdefault(branch["index"], {}), branch)
    return folded


def _lay_over(known: dict[str, list[Any]], update: dict[str, Any]) -> None:
    for name, values in update.items():
        if name == "index":
            continue
        older = known.get(name)
        if older is None or len(older) != len(values):
            known[name] = values
        else:
            known[name] = [
                old if new is None else new for old, new in zip(older, values, strict=True)
            ]
