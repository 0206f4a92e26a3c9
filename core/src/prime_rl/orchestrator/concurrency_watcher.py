"""Asks the engines how they are and sets the dispatcher's ceiling accordingly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.orchestrator.concurrency import ConcurrencyController
from prime_rl.orchestrator.dispatch import Dispatcher
from prime_rl.orchestrator.engine_load import EngineLoad, engine_load

log = logging.getLogger(__name__)

POLL_S = 1.0


class EngineMetrics(Protocol):
    """Where metrics come from."""

    async def metrics(self) -> Sequence[str] | None:
        """One page per engine; None when some engine did not answer with one."""


class ConcurrencyWatcher:
    """Follows the engines. Where they have no usable metrics at the start the ceiling stays fixed."""

    def __init__(
        self,
        engines: EngineMetrics,
        dispatcher: Dispatcher,
        config: ConcurrencyConfig,
        *,
        largest_group: int,
        seq_len: int,
    ) -> None:
        self._engines = engines
        self._dispatcher = dispatcher
        self._config = config
        self._largest_group = largest_group
        self._seq_len = seq_len
        self._controller: ConcurrencyController | None = None
        self._load: EngineLoad | None = None

    async def begin(self) -> None:
        """Set the first ceiling; before any episode starts."""
        if not self._config.adaptive:
            return
        self._load = await self._look()
        if self._load is not None:
            self._start(self._load)
            log.info("%d episodes at once to begin with", self._dispatcher.ceiling)
        else:
            log.info(
                "the engines have no metrics to follow: %d episodes at once",
                self._dispatcher.ceiling,
            )

    async def run(self) -> None:
        """Until cancelled, or at once over where there is nothing to follow."""
        while self._controller is not None:
            await asyncio.sleep(POLL_S)
            self._follow(await self._look())

    async def _look(self) -> EngineLoad | None:
        pages = await self._engines.metrics()
        return None if pages is None else engine_load(pages)

    def _start(self, load: EngineLoad) -> None:
        start = self._config.initial_inflight
        if start is None and load.capacity_tokens is not None:
            start = load.capacity_tokens // self._seq_len
        self._controller = ConcurrencyController(
            start=self._dispatcher.ceiling if start is None else start,
            smallest=max(self._config.min_inflight, self._largest_group),
            largest=self._config.largest_inflight,
        )
        self._dispatcher.ceiling = self._controller.ceiling

    def _follow(self, load: EngineLoad | None) -> None:
        assert self._controller is not None
        self._load = load or self._load
        dispatcher = self._dispatcher
        verdict = self._controller.poll(
            load,
            inflight=dispatcher.inflight,
            completed=dispatcher.completed,
            now_s=time.monotonic(),
        )
        if not verdict.reason:
            return
        dispatcher.ceiling = verdict.ceiling
        cancelled = dispatcher.cancel_youngest() if verdict.cancels else 0
        level = logging.INFO if cancelled else logging.DEBUG
        text = "%s: %d episodes run at once, %d groups given up"
        log.log(level, text, verdict.reason, verdict.ceiling, cancelled)
        dispatcher.pump()

    def weights_updated(self) -> None:
        """The engines run a new version."""
        if self._controller is not None:
            self._controller.weights_updated()

    def metrics(self) -> dict[str, float]:
        """Figures of now."""
        found: dict[str, float] = {"concurrency/ceiling": self._dispatcher.ceiling}
        if self._load is not None:
            found |= {
                "concurrency/running": self._load.running,
                "concurrency/waiting": self._load.waiting,
                "concurrency/cache_usage": self._load.cache_usage,
                "concurrency/evictions": self._load.evictions,
            }
        return found
