"""A file of JSON lines with one writer: locked, its torn tail cut when it is opened again."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

log = logging.getLogger(__name__)

_encoder = msgspec.json.Encoder()
_SCAN_BYTES = 1 << 16


class StreamInUse(RuntimeError):
    """Another process holds the file open for writing."""


def encode_line(record: Any) -> bytes:
    """One record as a line. NaN and infinities become null: JSON has no other word for them."""
    return _encoder.encode(record) + b"\n"


class LineFile:
    """Appends whole lines to a file. Raises StreamInUse while another writer has it open.

    A process that was killed in the middle of a line leaves a torn tail; opening the file cuts it,
    so that the next record never gets glued to half of an old one. Complete lines stay.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            os.close(self._descriptor)
            raise StreamInUse(f"{path} is being written by another process") from error
        self.size = self._cut_torn_tail()

    def _cut_torn_tail(self) -> int:
        size = os.fstat(self._descriptor).st_size
        end = size
        while end > 0:
            start = max(0, end - _SCAN_BYTES)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end < size:
            log.warning("%s: cut %d bytes of a line that was never finished", self.path, size - end)
            os.ftruncate(self._descriptor, end)
        return end

    def append(self, data: bytes) -> int:
        """Write whole lines at the end; returns the offset of the first byte."""
        offset = self.size
        view = memoryview(data)
        while view:
            written = os.pwrite(self._descriptor, view, self.size)
            self.size += written
            view = view[written:]
        return offset

    def truncate(self, size: int) -> None:
        """Drop everything from byte `size` on."""
        os.ftruncate(self._descriptor, size)
        self.size = size

    def close(self) -> None:
        """Release the lock. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def complete_lines(path: Path, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """(offset, line without its newline) of every finished line from byte `start` on."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek(start)
        offset = start
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield offset, line[:-1]
            offset += len(line)


class LineFollower:
    """Reads a growing file of JSON lines; a line counts once it is finished."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.offset = 0

    def poll(self) -> list[Any]:
        """Records finished since the last call. A line that is no JSON is skipped with a warning."""
        records = []
        for offset, line in complete_lines(self.path, self.offset):
            self.offset = offset + len(line) + 1
            try:
                records.append(msgspec.json.decode(line))
            except msgspec.DecodeError:
                log.warning("%s: skipped a damaged line at byte %d", self.path, offset)
        return records
