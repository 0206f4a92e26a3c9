"""When the next episode may start: smooth growth after a pause, and a rate per minute."""

from __future__ import annotations

import math
from collections.abc import Callable

LEAST_GROWTH = 64
"""Episodes that may always start at once: engines take so many prompts without harm."""
BURST_S = 1.0
"""A rate catches up with at most this much time in which nothing started."""


class Admission:
    """Two brakes. Both are off by default.

    Growth: within a window, episodes started minus episodes that came to their end may grow to
    max(LEAST_GROWTH, largest_group, max_inflight // 10). Ends of the same window give places back, so
    that a run in its stride is never slowed; cancelled episodes give none.

    Rate: starts are spaced by 60 s / per_minute; after a pause, at most BURST_S worth of them come
    together.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_inflight: int = 0,
        largest_group: int = 1,
        window_s: float = 0.0,
        per_minute: int | None = None,
    ) -> None:
        self._clock = clock
        self._window_s = window_s
        self.growth = max(LEAST_GROWTH, largest_group, max_inflight // 10)
        """Net growth per window."""
        self._window_start = -math.inf
        self._grown = 0
        self._interval_s = 60.0 / per_minute if per_minute else 0.0
        self._due = -math.inf

    def wait_s(self) -> float:
        """Seconds until an episode may start; 0: now."""
        now = self._clock()
        wait_s = max(0.0, self._due - now) if self._interval_s else 0.0
        if self._window_s:
            left_s = self._window_start + self._window_s - now
            if left_s <= 0:
                self._window_start, self._grown = now, 0
            elif self._grown >= self.growth:
                wait_s = max(wait_s, left_s)
        return wait_s

    def started(self) -> None:
        """An episode starts."""
        self._grown += 1
        if self._interval_s:
            self._due = max(self._due, self._clock() - BURST_S) + self._interval_s

    def ended(self) -> None:
        """An episode came to its end."""
        self._grown -= 1
