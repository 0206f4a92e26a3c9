"""Asks every engine for its health, again and again, in the background."""

from __future__ import annotations

import asyncio
import logging

import aiohttp

from prime_rl_router_sticky.config import StickyConfig
from prime_rl_router_sticky.placement import Engine, Placements

logger = logging.getLogger(__name__)


class HealthChecks:
    """One task per engine, so that a slow one delays nobody else's check."""

    def __init__(
        self, placements: Placements, client: aiohttp.ClientSession, config: StickyConfig
    ) -> None:
        self._placements = placements
        self._client = client
        self._config = config
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin."""
        self._tasks = [
            asyncio.create_task(self._watch(engine)) for engine in self._placements.engines
        ]

    async def stop(self) -> None:
        """End."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _watch(self, engine: Engine) -> None:
        while True:
            problem = await self._problem(engine)
            if problem is None:
                if not engine.is_healthy:
                    logger.info("engine %s is back", engine.url)
                engine.is_healthy, engine.failed_checks = True, 0
            else:
                engine.failed_checks += 1
                if engine.is_healthy and engine.failed_checks >= self._config.health_failures:
                    engine.is_healthy = False
                    logger.warning("engine %s is down: %s", engine.url, problem)
            await asyncio.sleep(self._config.health_interval_s)

    async def _problem(self, engine: Engine) -> str | None:
        timeout = aiohttp.ClientTimeout(total=self._config.health_timeout_s)
        try:
            async with self._client.get(f"{engine.url}/health", timeout=timeout) as answer:
                await answer.read()
                return None if answer.status < 400 else f"HTTP {answer.status}"
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            return f"{type(error).__name__}: {error}"
