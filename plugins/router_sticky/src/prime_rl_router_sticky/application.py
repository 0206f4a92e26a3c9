"""The router as an ASGI application: forwards, streams, and moves on when an engine is gone."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import parse_qs

from prime_rl_router_sticky.config import StickyConfig
from prime_rl_router_sticky.forward import (
    ClientLeft,
    EngineGone,
    EngineRefused,
    Forwarder,
    Incoming,
)
from prime_rl_router_sticky.health import HealthChecks
from prime_rl_router_sticky.placement import Engine, Placements

logger = logging.getLogger(__name__)

Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]

SESSION_HEADER = b"x-session-id"
MAX_SESSION_BYTES = 256
ADMIN_PATHS = frozenset(
    {"/pause", "/resume", "/update_weights", "/abort_requests", "/start_weight_update"}
)
"""Must reach every engine, so they go to the engines directly."""


class BodyTooLarge(Exception):
    """The client sends more than is taken."""


class StickyApplication:
    """One router. Its state belongs to the event loop that first calls it."""

    def __init__(self, config: StickyConfig, engine_urls: Sequence[str]) -> None:
        if not engine_urls:
            raise ValueError("a router needs at least one engine URL")
        self.config = config
        self.placements = Placements(engine_urls, config.session_idle_s, config.max_sessions)
        self._forwarder: Forwarder | None = None
        self._checks: HealthChecks | None = None

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(scope, receive, send)
        else:
            raise ValueError(f"the router speaks HTTP only, found {scope['type']}")

    async def start(self) -> None:
        """Open the client and begin the health checks; called by the first request otherwise."""
        if self._forwarder is None:
            self._forwarder = Forwarder(self.config.connect_timeout_s)
            self._checks = HealthChecks(self.placements, self._forwarder.client, self.config)
            self._checks.start()

    async def close(self) -> None:
        """Close connections and end the health checks."""
        forwarder, checks = self._forwarder, self._checks
        self._forwarder = self._checks = None
        if checks is not None:
            await checks.stop()
        if forwarder is not None:
            await forwarder.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                await self.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await self.close()
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _http(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        await self.start()
        path, method = scope["path"], scope["method"]
        if path == "/finish_session" and method == "POST":
            await self._finish_session(scope, send)
        elif path == "/health" and method == "GET":
            is_up = any(engine.is_healthy for engine in self.placements.engines)
            await answer(send, 200 if is_up else 503, {"status": "ok" if is_up else "no engine"})
        elif path == "/workers" and method == "GET":
            await answer(send, 200, {"workers": self._workers()})
        elif path in ADMIN_PATHS:
            text = f"{path} must reach every engine; call the engines directly, not the router"
            await refuse(send, 403, text)
        else:
            await self._forward(scope, receive, send)

    async def _finish_session(self, scope: dict[str, Any], send: Send) -> None:
        names = parse_qs(scope["query_string"].decode("latin-1")).get("session_id")
        if not names:
            await refuse(send, 400, "finish_session needs ?session_id=...")
            return
        for name in names:
            self.placements.finish(name)
        await answer(send, 200, {"status": "ok", "session_id": names[-1]})

    def _workers(self) -> list[dict[str, Any]]:
        return [
            {
                "url": engine.url,
                "is_healthy": engine.is_healthy,
                "sessions": engine.sessions,
                "requests": engine.requests,
            }
            for engine in self.placements.engines
        ]

    async def _forward(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        name: str | None = None
        for key, value in scope["headers"]:
            if key == SESSION_HEADER and value:
                if len(value) > MAX_SESSION_BYTES:
                    text = f"X-Session-ID has {len(value)} bytes, at most {MAX_SESSION_BYTES}"
                    await refuse(send, 400, text)
                    return
                name = value.decode("latin-1")
        try:
            body = await read_body(receive, self.config.max_body_mib * 2**20)
        except ClientLeft:
            return
        except BodyTooLarge as error:
            await refuse(send, 413, str(error))
            return
        request = Incoming(scope, body, receive, send)
        tried: set[Engine] = set()
        problem = ""
        while (engine := self.placements.begin(name, tried)) is not None:
            assert self._forwarder is not None
            is_answered = False
            try:
                status = await self._forwarder.forward(request, engine.url)
                is_answered = status < 500
                return
            except EngineRefused as error:
                self.placements.mark_down(engine)
                problem = str(error)
            except EngineGone as error:
                # Bytes have gone out. Returning without completing the answer makes the server
                # close the connection, so that the client sees the answer break off.
                logger.warning("%s", error)
                is_answered = True
                return
            except ClientLeft:
                is_answered = True
                return
            finally:
                self.placements.end(name, engine, is_answered)
            tried.add(engine)
        await refuse(
            send, 503, f"no engine answers; the last one: {problem}", {b"retry-after": b"1"}
        )


async def read_body(receive: Receive, most: int) -> bytes:
    """The request's body. Raises ClientLeft or BodyTooLarge."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeft
        part = message.get("body", b"")
        size += len(part)
        if size > most:
            raise BodyTooLarge(f"the body has more than {most} bytes")
        parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


async def answer(
    send: Send, status: int, content: Any, headers: dict[bytes, bytes] | None = None
) -> None:
    """Send JSON."""
    body = json.dumps(content, separators=(",", ":")).encode()
    fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    fields += list((headers or {}).items())
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": body})


async def refuse(
    send: Send, status: int, message: str, headers: dict[bytes, bytes] | None = None
) -> None:
    """Send an error in the form the engines use."""
    error = {"message": message, "type": "RouterError", "param": None, "code": status}
    await answer(send, status, {"error": error}, headers)
