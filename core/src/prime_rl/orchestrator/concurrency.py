"""The ceiling of episodes in flight, led by what the engines say about their caches and queues.

    growth    x 1.25 once as many episodes have ended as the ceiling allows, when at least 0.9 of it
              is in use, nothing queues, and the caches are filled below 0.6; between 0.6 and 0.8 the
              step shrinks linearly to nothing
    caches    filled to 0.9 or more: the episodes in flight go back to 0.7 of the caches
    eviction  engines evicted running requests: x 0.8; again soon after: x 0.5
    queue     waiting / running >= 0.5 in 6 polls in a row: x 0.9

The first two cuts cancel the youngest groups, the last one only lets no new ones start. After a cut 6
polls pass before the next change. The queue does not count within 6 polls of the start or of a weight
update, in which engines stand still. Metrics older than 15 s stop growth.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from prime_rl.orchestrator.engine_load import EngineLoad

GROWTH = 1.25
BINDING_SHARE = 0.9
GROW_BELOW, SOFT_LIMIT, HARD_LIMIT, CUT_TO = 0.6, 0.8, 0.9, 0.7
QUEUE_RATIO, QUEUE_POLLS, QUEUE_FACTOR = 0.5, 6, 0.9
EVICTION_FACTOR, ESCALATED_FACTOR = 0.8, 0.5
COOLDOWN_POLLS = 6
GRACE_POLLS = 6
ESCALATION_POLLS = 2 * COOLDOWN_POLLS
"""Evictions within so many polls of a cut for evictions are cut harder."""
OLDEST_METRICS_S = 15.0


@dataclass(frozen=True)
class Verdict:
    """What a poll changes."""

    ceiling: int
    cancels: bool
    """Episodes above the ceiling are cancelled, not waited for."""
    reason: str = ""
    """"" when nothing changes."""


class ConcurrencyController:
    """Pure: takes figures, gives a ceiling; knows neither clock nor network."""

    def __init__(self, *, start: int, smallest: int, largest: int) -> None:
        self._smallest = min(smallest, largest)
        self._largest = largest
        self.ceiling = self._clamp(start)
        """Most episodes in flight."""
        self._polls = 0
        self._quiet_until = GRACE_POLLS
        self._cool_until = 0
        self._last_eviction_cut = -math.inf
        self._queued_polls = 0
        self._evictions: float | None = None
        self._completed_before = 0
        self._measured_s = -math.inf

    def weights_updated(self) -> None:
        """Engines stood still for a moment."""
        self._quiet_until = self._polls + GRACE_POLLS

    def poll(
        self, load: EngineLoad | None, *, inflight: int, completed: int, now_s: float
    ) -> Verdict:
        """One look. `load` is None when it could not be had, `completed` counts episodes that came to
        their end since the start."""
        self._polls += 1
        evicted = 0.0
        if load is not None:
            self._measured_s = now_s
            evicted = self._new_evictions(load.evictions)
            is_queueing = load.waiting >= QUEUE_RATIO * load.running and load.waiting > 0
            self._queued_polls = self._queued_polls + 1 if is_queueing else 0
            cut = self._cut(load, evicted, inflight)
            if cut is not None:
                self._cool_until = self._polls + COOLDOWN_POLLS
                self._queued_polls = 0
                self._completed_before = completed
                self.ceiling = cut.ceiling
                return cut
        return self._grown(load, inflight, completed, now_s)

    def _new_evictions(self, total: float) -> float:
        """Evictions since the last poll; a restarted engine counts from 0 again."""
        before = total if self._evictions is None else self._evictions
        self._evictions = total
        return total - before if total >= before else total

    def _cut(self, load: EngineLoad, evicted: float, inflight: int) -> Verdict | None:
        if self._polls <= self._cool_until:
            return None
        running = min(self.ceiling, inflight)
        if evicted:
            is_again = self._polls - self._last_eviction_cut <= ESCALATION_POLLS
            self._last_eviction_cut = self._polls
            factor = ESCALATED_FACTOR if is_again else EVICTION_FACTOR
            return self._verdict(running * factor, True, f"{evicted:g} evictions")
        if load.cache_usage >= HARD_LIMIT:
            target = running * CUT_TO / load.cache_usage
            return self._verdict(target, True, f"caches filled to {load.cache_usage:.2f}")
        if self._queued_polls >= QUEUE_POLLS and self._polls > self._quiet_until:
            reason = f"{load.waiting:g} requests wait beside {load.running:g} running"
            return self._verdict(self.ceiling * QUEUE_FACTOR, False, reason)
        return None

    def _grown(
        self, load: EngineLoad | None, inflight: int, completed: int, now_s: float
    ) -> Verdict:
        unchanged = Verdict(self.ceiling, False)
        if completed - self._completed_before < self.ceiling or self._polls <= self._cool_until:
            return unchanged
        is_fresh = load is not None or now_s - self._measured_s <= OLDEST_METRICS_S
        if load is None and is_fresh:
            return unchanged  # the next metrics decide; the turnover is not lost
        self._completed_before = completed
        is_binding = inflight >= BINDING_SHARE * self.ceiling
        if load is None or not is_binding or self._queued_polls:
            return unchanged
        room = (SOFT_LIMIT - load.cache_usage) / (SOFT_LIMIT - GROW_BELOW)
        step = (GROWTH - 1) * min(1.0, max(0.0, room))
        verdict = self._verdict(math.ceil(self.ceiling * (1 + step)), False, "room")
        if verdict.ceiling == self.ceiling:
            return unchanged
        self.ceiling = verdict.ceiling
        return verdict

    def _verdict(self, target: float, cancels: bool, reason: str) -> Verdict:
        return Verdict(self._clamp(target), cancels, reason)

    def _clamp(self, value: float) -> int:
        return int(min(max(value, self._smallest), self._largest))
