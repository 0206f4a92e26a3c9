"""Releases sessions at a router that runs elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from urllib.parse import quote

import httpx

log = logging.getLogger(__name__)


class RemoteSessions:
    """Posts `/finish_session` in the background. What answers at the URL may be a plain engine that
    knows no sessions: after the first refusal nothing more is sent."""

    def __init__(self, base_url: str) -> None:
        self._url = f"{base_url.rstrip('/')}/finish_session"
        self._client = httpx.AsyncClient(timeout=10.0)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_supported = True

    def finish(self, session_ids: Sequence[str]) -> None:
        """Does not wait."""
        if not self._is_supported:
            return
        for session_id in session_ids:
            task = asyncio.get_running_loop().create_task(self._post(session_id))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _post(self, session_id: str) -> None:
        try:
            answer = await self._client.post(f"{self._url}?session_id={quote(session_id)}")
        except httpx.HTTPError as error:
            log.warning("session %s was not released: %s", session_id, error)
            return
        if answer.status_code in (404, 405):
            self._is_supported = False
            log.info("%s is not known there; sessions are not released", self._url)

    async def close(self) -> None:
        """Let what is on its way arrive, for a moment."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        await self._client.aclose()
