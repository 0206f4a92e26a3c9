"""The index of the episode stream: who, where, at which byte."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.traces.lines import complete_lines

log = logging.getLogger(__name__)

STREAM_NAME = "stream.jsonl"
INDEX_NAME = "stream.index.jsonl"


class IndexEntry(msgspec.Struct, frozen=True):
    """One record of the stream."""

    record: int
    """Number of the record, from 0, without gaps."""
    offset: int
    """First byte of its line."""
    length: int
    """Bytes of its line, newline included."""
    episode_id: str
    trace_ids: list[str]
    source: str
    step: int

    @property
    def end(self) -> int:
        """First byte after the line."""
        return self.offset + self.length


_decoder = msgspec.json.Decoder(IndexEntry)


def entry_of(record: dict[str, Any], number: int, offset: int, length: int) -> IndexEntry:
    """The index entry of an episode record as `EpisodeStream.append` takes it."""
    return IndexEntry(
        record=number,
        offset=offset,
        length=length,
        episode_id=str(record.get("id", "")),
        trace_ids=[str(trace.get("id", "")) for trace in record.get("traces", [])],
        source=str(record.get("source", "")),
        step=int(record.get("step", -1)),
    )


def read_index(directory: Path, stream_size: int | None = None) -> list[IndexEntry]:
    """Entries that describe the stream without a gap; reading stops at the first that does not.

    `stream_size`: entries beyond this many bytes are not believed (the stream lost its tail).
    """
    if stream_size is None:
        stream = directory / STREAM_NAME
        stream_size = stream.stat().st_size if stream.exists() else 0
    entries: list[IndexEntry] = []
    end = 0
    for _, line in complete_lines(directory / INDEX_NAME):
        try:
            entry = _decoder.decode(line)
        except msgspec.DecodeError:
            log.warning("%s: damaged entry %d", directory / INDEX_NAME, len(entries))
            break
        if entry.record != len(entries) or entry.offset != end or entry.end > stream_size:
            break
        entries.append(entry)
        end = entry.end
    return entries
