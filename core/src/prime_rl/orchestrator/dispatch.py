"""Turns tasks into running episodes: concurrency, the gate, evaluation first, cancellation.

Every dispatched episode reaches the sink exactly once, or is covered by exactly one
GroupCancellation; for every group the two add up to its size.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol

from prime_rl.orchestrator.admission import Admission
from prime_rl.orchestrator.episode import EpisodeRequest, EpisodeResult, Split
from prime_rl.orchestrator.policy import Policy, Progress, staleness
from prime_rl.orchestrator.source import Draw

log = logging.getLogger(__name__)

CancellationReason = Literal["stale", "overload", "finished", "stopped"]


@dataclass(frozen=True)
class GroupCancellation:
    """Stands for the `count` episodes of a group that will never reach the sink."""

    split: Split
    source: str
    group_id: int
    count: int
    reason: CancellationReason


class EpisodeRunner(Protocol):
    """Runs one episode to its end; failures are outcomes, not exceptions."""

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        """Cancelling the caller aborts the episode."""


class Sink(Protocol):
    """Takes what becomes of dispatched episodes."""

    def finished(self, result: EpisodeResult) -> None:
        """An episode is over."""

    def cancelled(self, cancellation: GroupCancellation) -> None:
        """The rest of a group will not come."""


@dataclass
class GroupInFlight:
    """A group of which not everything has been emitted."""

    split: Split
    source: str
    group_id: int
    task_index: int
    size: int
    version: int
    step: int
    scheduled: int = 0
    emitted: int = 0
    is_cancelled: bool = False
    started_s: float = 0.0
    """When it was begun (time.monotonic)."""
    tasks: dict[asyncio.Task[None], float] = field(default_factory=dict)
    """Running episodes -> their start (time.monotonic)."""

    @property
    def is_scheduled(self) -> bool:
        """Nothing is left to start."""
        return self.is_cancelled or self.scheduled == self.size

    def next_request(self) -> EpisodeRequest:
        """The next member to start."""
        request = EpisodeRequest(
            split=self.split,
            source=self.source,
            task_index=self.task_index,
            group_id=self.group_id,
            member=self.scheduled,
            version=self.version,
            step=self.step,
        )
        self.scheduled += 1
        return request


class Dispatcher:
    """Starts as many episodes as may run, whenever `pump` is called.

    `wants_more` is asked before a new training group, with the episodes of the groups in flight: it
    is the gate, and keeps the queue from filling with episodes that would be old when they ship. A
    group that has begun is completed or cancelled as a whole.
    """

    def __init__(
        self,
        *,
        runner: EpisodeRunner,
        sink: Sink,
        policy: Policy,
        progress: Progress,
        draw: Callable[[], Draw],
        wants_more: Callable[[int], bool],
        group_sizes: dict[str, int],
        max_inflight: int,
        max_off_policy_steps: int,
        never_stale: Collection[str] = (),
        admission: Admission | None = None,
    ) -> None:
        self._runner = runner
        self._sink = sink
        self._policy = policy
        self._progress = progress
        self._draw = draw
        self._wants_more = wants_more
        self._group_sizes = group_sizes
        self.ceiling = max_inflight
        """Most episodes in flight. Lowering it stops starts; see `cancel_youngest` for the rest."""
        self.completed = 0
        """Episodes that came to their end."""
        self._admission = admission or Admission(time.monotonic)
        self._timer: asyncio.TimerHandle | None = None
        self._max_off_policy_steps = max_off_policy_steps
        self._never_stale = frozenset(never_stale)
        self._groups: dict[tuple[Split, int], GroupInFlight] = {}
        self._current: GroupInFlight | None = None
        self._eval_queue: deque[GroupInFlight] = deque()
        self._inflight = 0
        self._trains = True
        self._is_pumping = False
        self.failure: BaseException | None = None
        """What broke while an episode was handled: a fault of ours, not of the episode."""

    @property
    def inflight(self) -> int:
        """Episodes running."""
        return self._inflight

    def inflight_staleness(self) -> list[int]:
        """Staleness of every running training episode that grows stale."""
        return [
            staleness(self._progress.step, group.version)
            for group in self._groups.values()
            if group.split == "train" and group.source not in self._never_stale
            for _ in group.tasks
        ]

    def enqueue_eval(self, groups: list[GroupInFlight]) -> None:
        """Run these before any further training episode."""
        self._eval_queue.extend(groups)
        self.pump()

    def pump(self) -> None:
        """Start what may start. Cheap when nothing may."""
        if self._is_pumping:
            return
        self._is_pumping = True
        try:
            while self._inflight < self.ceiling:
                wait_s = self._admission.wait_s()
                if wait_s > 0:
                    self._pump_in(wait_s)
                    return
                group = self._group_to_schedule()
                if group is None:
                    return
                self._start(group)
        finally:
            self._is_pumping = False

    def _pump_in(self, wait_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(wait_s, self.pump)

    def _group_to_schedule(self) -> GroupInFlight | None:
        while self._eval_queue:
            if not self._eval_queue[0].is_scheduled:
                group = self._eval_queue[0]
                self._groups.setdefault((group.split, group.group_id), group)
                return group
            self._eval_queue.popleft()
        if self._current is not None and not self._current.is_scheduled:
            return self._current
        self._current = None
        committed = sum(group.size for group in self._groups.values() if group.split == "train")
        if not self._trains or not self._wants_more(committed):
            return None
        draw = self._draw()
        self._current = GroupInFlight(
            split="train",
            source=draw.source,
            group_id=draw.number,
            task_index=draw.task_index,
            size=self._group_sizes[draw.source],
            version=self._policy.version,
            step=self._progress.step,
            started_s=time.monotonic(),
        )
        self._groups["train", draw.number] = self._current
        return self._current

    def _start(self, group: GroupInFlight) -> None:
        task = asyncio.get_running_loop().create_task(self._run(group, group.next_request()))
        group.tasks[task] = time.monotonic()
        self._inflight += 1
        self._admission.started()
        task.add_done_callback(lambda done: self._ended(group, done))

    async def _run(self, group: GroupInFlight, request: EpisodeRequest) -> None:
        result = await self._runner.run(request)
        if group.is_cancelled:
            return
        group.emitted += 1
        if group.emitted == group.size:
            del self._groups[group.split, group.group_id]
        self._sink.finished(result)

    def _ended(self, group: GroupInFlight, task: asyncio.Task[None]) -> None:
        del group.tasks[task]
        self._inflight -= 1
        if not task.cancelled():
            self.completed += 1
            self._admission.ended()
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failure = self.failure or error
        elif task.cancelled() and not group.is_cancelled:
            # Nobody but `cancel` cancels episodes; anything else would lose one silently.
            self.failure = self.failure or RuntimeError(
                f"an episode of group {group.group_id} ended without a result"
            )
        self.pump()

    def cancel(self, group: GroupInFlight, reason: CancellationReason) -> None:
        """Abort a group. What it has emitted stays emitted; the rest is one GroupCancellation."""
        if group.is_cancelled:
            return
        group.is_cancelled = True
        self._groups.pop((group.split, group.group_id), None)
        for task in list(group.tasks):
            task.cancel()
        self._sink.cancelled(
            GroupCancellation(
                split=group.split,
                source=group.source,
                group_id=group.group_id,
                count=group.size - group.emitted,
                reason=reason,
            )
        )

    def cancel_stale(self, pending_version: int) -> int:
        """Abort training groups that could not ship any more once `pending_version` is there;
        returns their number."""
        earliest_step = max(self._progress.step, pending_version + 1)
        stale = [
            group
            for group in self._groups.values()
            if group.split == "train"
            and group.source not in self._never_stale
            and staleness(earliest_step, group.version) > self._max_off_policy_steps
        ]
        for group in stale:
            self.cancel(group, "stale")
        return len(stale)

    def cancel_youngest(self) -> int:
        """Abort training groups, the last begun first, until no more episodes run than the ceiling
        allows; returns their number. The oldest stays in any case: work must go on. So do those that
        a frozen model plays: their end would not relieve the engines."""
        groups = [
            group
            for group in self._groups.values()
            if group.split == "train" and group.source not in self._never_stale
        ]
        running = sum(len(group.tasks) for group in self._groups.values())
        cancelled = 0
        for group in sorted(groups[1:], key=lambda each: each.started_s, reverse=True):
            if running <= self.ceiling:
                break
            running -= len(group.tasks)
            self.cancel(group, "overload")
            cancelled += 1
        return cancelled

    def stop_training(self, reason: CancellationReason) -> None:
        """Start no further training episode and abort those that run."""
        self._trains = False
        for group in [group for group in self._groups.values() if group.split == "train"]:
            self.cancel(group, reason)

    async def stop(self) -> None:
        """Abort everything and wait until it has ended."""
        self._trains = False
        self._eval_queue.clear()
        for group in list(self._groups.values()):
            self.cancel(group, "stopped")
        self.ceiling = 0
        if self._timer is not None:
            self._timer.cancel()
        while self._inflight:
            await asyncio.sleep(0.01)
