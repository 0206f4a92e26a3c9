"""Takes new weights: offered -> engines paused -> ready -> payload -> engines updated -> resumed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from prime_rl.control.broadcasts import BroadcastReceiver
from prime_rl.errors import RunError
from prime_rl.orchestrator.policy import Policy

log = logging.getLogger(__name__)

POLL_S = 0.02


class EngineControl(Protocol):
    """What a weight update asks of all engines together."""

    async def pause(self) -> None:
        """Requests stay; nothing is generated."""

    async def update(self, version: int, directory: Path) -> None:
        """Every engine takes the version."""

    async def resume(self) -> None:
        """Go on."""


class WeightWatcher:
    """Follows the trainer's offers. Skips to the newest; calls the observers around each update.

    `pauses_engines` is what the transport declares it needs: with False engines go on generating
    while the payload travels and are updated between two steps of theirs. An offer waits while
    `may_take` says no.
    """

    def __init__(
        self,
        receiver: BroadcastReceiver,
        engines: EngineControl,
        policy: Policy,
        *,
        pauses_engines: bool,
        may_take: Callable[[], bool],
        on_pending: Callable[[int], object],
        on_published: Callable[[int], None],
        on_applied: Callable[[int], None],
    ) -> None:
        self._receiver = receiver
        self._engines = engines
        self._policy = policy
        self._pauses_engines = pauses_engines
        self._may_take = may_take
        self._on_pending = on_pending
        self._on_published = on_published
        self._on_applied = on_applied
        self.update_times_s: list[float] = []
        """Seconds of each update since the list was last cleared."""

    async def run(self) -> None:
        """Take versions until cancelled."""
        while True:
            version = self._receiver.newest_offer(after=self._policy.version)
            if version is None:
                await asyncio.sleep(POLL_S)
            else:
                await self.take(version)

    async def wait_for(self, version: int, timeout_s: float) -> None:
        """Take offers until `version` (or a newer one) runs. Raises RunError after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._policy.version < version:
            offered = self._receiver.newest_offer(after=version - 1)
            if offered is not None:
                await self.take(offered)
            elif time.monotonic() > deadline:
                raise RunError(
                    f"the trainer did not offer version {version} within {timeout_s:g} s"
                )
            else:
                await asyncio.sleep(POLL_S)

    async def take(self, version: int) -> None:
        """One update."""
        while not self._may_take():
            await asyncio.sleep(POLL_S)
        started = time.monotonic()
        self._on_pending(version)
        if self._pauses_engines:
            await self._engines.pause()
        try:
            directory = self._receiver.acknowledge(version)
            await self._finished(version)
            self._policy.published = version
            self._on_published(version)
            await self._engines.update(version, directory)
        finally:
            if self._pauses_engines:
                await self._engines.resume()
        self._policy.version = version
        self.update_times_s.append(time.monotonic() - started)
        log.debug("engines run version %d (%.2f s)", version, self.update_times_s[-1])
        self._on_applied(version)

    async def _finished(self, version: int) -> None:
        deadline = time.monotonic() + self._receiver.timeout_s
        while not self._receiver.is_finished(version):
            if time.monotonic() > deadline:
                raise RunError(
                    f"the payload of version {version} did not arrive within "
                    f"{self._receiver.timeout_s:g} s"
                )
            await asyncio.sleep(POLL_S / 2)
