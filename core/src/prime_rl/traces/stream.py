"""The append-only stream of finished episodes, with an index of byte offsets."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.traces.index import INDEX_NAME, STREAM_NAME, IndexEntry, entry_of, read_index
from prime_rl.traces.lines import LineFile, complete_lines, encode_line

log = logging.getLogger(__name__)


class EpisodeStream:
    """Writes `stream.jsonl` and `stream.index.jsonl` in `directory`; one writer at a time.

    Nothing is ever removed but the unfinished last line of a writer that was killed: a resumed run
    appends to what is there. Records carry `id`, `source`, `step` and `traces` (each with `id`);
    everything else is the producer's.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._stream = LineFile(directory / STREAM_NAME)
        self._index = LineFile(directory / INDEX_NAME)
        self.records = self._recover()

    def _recover(self) -> int:
        """Make the index describe exactly the finished lines of the stream; returns their count."""
        believed = read_index(self.directory, self._stream.size)
        lines = b"".join(encode_line(entry) for entry in believed)
        if len(lines) != self._index.size:
            log.warning("%s: rebuilt after entry %d", self._index.path, len(believed))
            self._index.truncate(0)
            self._index.append(lines)
        end = believed[-1].end if believed else 0
        number = len(believed)
        for offset, line in complete_lines(self._stream.path, end):
            self._index.append(encode_line(_read_entry(line, number, offset)))
            number += 1
        return number

    def append(self, record: dict[str, Any]) -> IndexEntry:
        """Store one finished episode; it is on its way to the disk when this returns."""
        line = encode_line(record)
        offset = self._stream.append(line)
        entry = entry_of(record, self.records, offset, len(line))
        self._index.append(encode_line(entry))
        self.records += 1
        return entry

    def close(self) -> None:
        """Release both files. Idempotent."""
        self._stream.close()
        self._index.close()


def _read_entry(line: bytes, number: int, offset: int) -> IndexEntry:
    try:
        record = msgspec.json.decode(line)
    except msgspec.DecodeError:
        record = {}
    if not isinstance(record, dict):
        record = {}
    return entry_of(record, number, offset, len(line) + 1)
