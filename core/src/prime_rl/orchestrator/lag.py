"""How late the event loop runs what is due: time it spends in one piece of work after another."""

from __future__ import annotations

import asyncio

INTERVAL_S = 0.02


class EventLoopLag:
    """Sleeps for short times and notes how much longer each took. Figures in seconds."""

    def __init__(self) -> None:
        self.lags_s: list[float] = []

    async def run(self) -> None:
        """Measure until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + INTERVAL_S
            await asyncio.sleep(INTERVAL_S)
            self.lags_s.append(max(0.0, loop.time() - due))

    def take(self) -> dict[str, float]:
        """Figures since the last call; none when nothing was measured."""
        lags_s, self.lags_s = self.lags_s, []
        if not lags_s:
            return {}
        return {
            "event_loop_lag/mean": sum(lags_s) / len(lags_s),
            "event_loop_lag/max": max(lags_s),
        }
