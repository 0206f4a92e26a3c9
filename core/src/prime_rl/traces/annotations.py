"""What a producer adds to episodes after they were stored: per-token numbers by trace and branch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from prime_rl.traces.lines import LineFile, encode_line
from prime_rl.traces.rounding import round_stream

ANNOTATION_VERSION = 1
_FLUSH_BYTES = 1 << 20


def annotation_path(directory: Path, producer: str) -> Path:
    """The file of a producer."""
    return directory / "annotations" / f"{producer}.jsonl"


class AnnotationWriter:
    """Appends to `annotations/<producer>.jsonl` in the trace directory; one writer per producer.

    Lines are gathered in memory until `flush` (call it once per step) or one MiB.
    """

    def __init__(self, directory: Path, producer: str) -> None:
        self._file = LineFile(annotation_path(directory, producer))
        self._pending = bytearray()

    def write(
        self,
        trace_id: str,
        branch_index: int,
        step: int,
        streams: Mapping[str, Sequence[float | bool | None]],
    ) -> None:
        """Per-token values of one branch, each as long as the branch, None where there is none."""
        branch = {"index": branch_index}
        rounded = {name: round_stream(values) for name, values in streams.items()}
        self._pending += encode_line(
            {
                "version": ANNOTATION_VERSION,
                "trace_id": trace_id,
                "step": step,
                "branches": [{**branch, **rounded}],
            }
        )
        if len(self._pending) >= _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand everything gathered to the system."""
        if self._pending:
            self._file.append(bytes(self._pending))
            self._pending.clear()

    def close(self) -> None:
        """Flush and release the file."""
        self.flush()
        self._file.close()
