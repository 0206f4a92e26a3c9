"""Hosts the router's application in a thread with its own event loop and a loopback port."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import uvicorn

from prime_rl.errors import RunError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 3.0
KEEP_ALIVE_S = 75
"""Idle time after which a connection is closed: well above the 5 s after which the environments' HTTP
client gives one up. With equal times, a turn that comes then is sent into a closing connection."""


class RouterHost:
    """Serves an ASGI application until `stop`."""

    def __init__(self, application: Any) -> None:
        self._application = application
        # asyncio switches Nagle off only for sockets that say TCP; with it, answers wait 40 ms.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(
            application,
            log_level="warning",
            access_log=False,
            lifespan="auto",
            timeout_graceful_shutdown=1,
            backlog=4096,
            timeout_keep_alive=KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="router", daemon=True)

    def start(self) -> None:
        """Start serving; returns once requests are answered. Raises RunError."""
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or self._failure is not None:
            raise RunError(f"the router did not start: {self._failure or 'no answer'}")

    def check(self) -> None:
        """Raises RunError when the router has ended by itself."""
        if not self._thread.is_alive() and self._started.is_set():
            raise RunError(f"the router ended: {self._failure or 'its server stopped'}")

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:  # handed to the thread that asks: `start` and `check`
            self._failure = failure
            log.exception("the router failed")
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        while not self._server.started and not serving.done():
            await asyncio.sleep(0.005)
        self._started.set()
        await serving

    def finish_sessions(self, session_ids: Sequence[str]) -> None:
        """Release sessions: `POST /finish_session` straight into the application, without a
        connection. Does not wait; may be called from any thread."""
        if not session_ids or self._loop is None or self._loop.is_closed():
            return
        ids = list(session_ids)
        self._loop.call_soon_threadsafe(lambda: asyncio.ensure_future(self._finish_sessions(ids)))

    async def _finish_sessions(self, session_ids: Sequence[str]) -> None:
        for session_id in session_ids:
            status = await post(
                self._application, "/finish_session", f"session_id={quote(session_id)}"
            )
            if status >= 400:
                log.warning("the router refused to finish session %s: %d", session_id, status)

    def stop(self) -> None:
        """End the server. Idempotent."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(STOP_TIMEOUT_S)
        self._socket.close()


async def post(application: Any, path: str, query: str) -> int:
    """One POST without a body to an ASGI application; the status of its answer."""
    status = 500

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": query.encode(),
        "headers": [(b"host", b"router"), (b"content-length", b"0")],
        "client": ("127.0.0.1", 0),
        "server": ("127.0.0.1", 0),
    }
    await application(scope, receive, send)
    return status
