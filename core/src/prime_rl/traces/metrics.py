"""Metrics of a producer over steps: one JSON line per write."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prime_rl.traces.lines import LineFile, LineFollower, encode_line


class MetricsWriter:
    """Appends `{"step", "time", **metrics}`; one writer per file (StreamInUse otherwise)."""

    def __init__(self, path: Path) -> None:
        self._file = LineFile(path)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of `step`; `time` (seconds since 1970) is added. NaN is kept as null."""
        self._file.append(encode_line({"step": step, "time": round(time.time(), 3), **metrics}))

    def close(self) -> None:
        """Release the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All finished lines of a metrics file in order; [] when there is none. null reads as NaN."""
    return [
        {key: math.nan if value is None else value for key, value in record.items()}
        for record in LineFollower(path).poll()
    ]
