"""Sends one request to one engine and its answer back, byte for byte, as it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from yarl import URL

HOP_HEADERS = frozenset(
    {
        b"connection",
        b"content-length",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
"""Belong to one connection; both ends set their own."""
KEEP_ALIVE_S = 30.0
"""Shorter than any server's, so that a pooled connection is rarely closed under a request."""


class ClientLeft(Exception):
    """The client hung up."""


class EngineRefused(Exception):
    """The engine gave no byte of an answer; another may be asked."""


class EngineGone(Exception):
    """The engine broke off after the answer had begun; the client must see that."""


@dataclass
class Incoming:
    """A request, its body read."""

    scope: dict[str, Any]
    body: bytes
    receive: Callable[[], Awaitable[dict[str, Any]]]
    send: Callable[[dict[str, Any]], Awaitable[None]]


class Forwarder:
    """A pool of connections to all engines."""

    def __init__(self, connect_timeout_s: float) -> None:
        self.client = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout_s),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    async def close(self) -> None:
        """Close the connections."""
        await self.client.close()

    async def forward(self, request: Incoming, engine_url: str) -> int:
        """Ask one engine; the status of its answer, which has then been passed on whole.

        Raises EngineRefused, EngineGone or ClientLeft. When the client leaves, the connection to
        the engine is closed, which cancels the work there.
        """
        work = asyncio.ensure_future(self._exchange(request, engine_url))
        hangup = asyncio.ensure_future(_hangup(request))
        try:
            await asyncio.wait({work, hangup}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                raise ClientLeft
            return work.result()
        finally:
            hangup.cancel()
            if not work.done():
                work.cancel()

    async def _exchange(self, request: Incoming, engine_url: str) -> int:
        answer = await self._open(request, engine_url)
        try:
            fields = [
                (key.lower(), value)
                for key, value in answer.raw_headers
                if key.lower() not in HOP_HEADERS
            ]
            length = answer.headers.get("Content-Length")
            if length is not None:
                fields.append((b"content-length", length.encode()))
            await request.send(
                {"type": "http.response.start", "status": answer.status, "headers": fields}
            )
            async for part in answer.content.iter_any():
                await request.send({"type": "http.response.body", "body": part, "more_body": True})
            await request.send({"type": "http.response.body", "body": b""})
        except aiohttp.ClientError as error:
            answer.close()
            raise EngineGone(f"{engine_url} broke off: {error}") from error
        except BaseException:
            answer.close()
            raise
        answer.release()
        return answer.status

    async def _open(self, request: Incoming, engine_url: str) -> aiohttp.ClientResponse:
        """Send the request and wait for the head of the answer.

        A pooled connection may have been closed by the engine in the moment it was chosen; so what
        breaks without an answer is asked once more, over a new connection.
        """
        try:
            return await self._ask(request, engine_url)
        except aiohttp.ClientConnectorError as error:
            raise EngineRefused(f"{engine_url}: {error}") from error
        except (aiohttp.ClientError, TimeoutError, OSError):
            pass
        try:
            return await self._ask(request, engine_url)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineRefused(f"{engine_url}: {type(error).__name__}: {error}") from error

    async def _ask(self, request: Incoming, engine_url: str) -> aiohttp.ClientResponse:
        scope = request.scope
        path = scope.get("raw_path") or scope["path"].encode()
        query = scope["query_string"]
        target = (
            engine_url + path.decode("latin-1") + ("?" + query.decode("latin-1") if query else "")
        )
        headers = [
            (key.decode("latin-1"), value.decode("latin-1"))
            for key, value in scope["headers"]
            if key not in HOP_HEADERS
        ]
        return await self.client.request(
            scope["method"],
            URL(target, encoded=True),
            headers=headers,
            data=request.body or None,
            allow_redirects=False,
        )


async def _hangup(request: Incoming) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
