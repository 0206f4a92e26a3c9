"""Collects Python's garbage at chosen steps, so that all ranks pause together."""

from __future__ import annotations

import gc


class GarbageControl:
    """Takes collection over from Python while `interval` is set."""

    def __init__(self, interval: int | None) -> None:
        self._interval = interval
        if interval is not None:
            gc.collect()
            gc.freeze()
            gc.disable()

    def after_step(self, step: int) -> None:
        """Collect when it is time."""
        if self._interval is not None and step % self._interval == 0:
            gc.collect()

    def close(self) -> None:
        """Give collection back to Python."""
        if self._interval is not None:
            gc.enable()
            gc.unfreeze()
