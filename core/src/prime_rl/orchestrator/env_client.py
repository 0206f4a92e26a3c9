"""Client of one environment server: the `verifiers` wire, without the library.

The server streams a run's traces as deltas and ends with a reply. The plain record put together from
them is used as it is: building and validating the library's typed episode costs more than everything
else the orchestrator does with it, and importing the library more than starting the orchestrator.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import zmq

from prime_rl.errors import RunError
from prime_rl.orchestrator.assembly import EpisodeAssembly

log = logging.getLogger(__name__)

HEALTH_INTERVAL_S = 0.2
HEALTH_ID = "health"


_encode = msgspec.msgpack.encode
_decode = msgspec.msgpack.decode


class EpisodeRefused(RuntimeError):
    """The env server could not run the request at all."""


class EpisodeCall(Protocol):
    """A running episode."""

    @property
    def trace_ids(self) -> list[str]:
        """Traces opened so far; each is a session at the router."""

    async def result(self) -> dict[str, Any]:
        """The episode's record. Cancelling the caller aborts the episode on the server."""


class Environment(Protocol):
    """Runs episodes of one source."""

    def start(
        self, task: Mapping[str, Any], model: str, sampling: Mapping[str, Any]
    ) -> EpisodeCall:
        """Begin an episode."""

    async def close(self) -> None:
        """Abort what runs and release the connection."""


class ServedEpisode:
    """One request to the env server."""

    def __init__(self, client: EnvironmentClient, request: bytes) -> None:
        self._client = client
        self._request = request
        self.id = uuid.uuid4().hex
        self.assembly = EpisodeAssembly()
        self.reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    @property
    def trace_ids(self) -> list[str]:
        """See EpisodeCall.trace_ids."""
        return list(self.assembly.traces)

    async def result(self) -> dict[str, Any]:
        """See EpisodeCall.result. Raises EpisodeRefused when the server refuses."""
        try:
            self._client.send(self.id, b"run", self._request)
            answer = _decode(await self.reply)
        except asyncio.CancelledError:
            self._client.abort(self.id)
            raise
        finally:
            self._client.forget(self.id)
        if not answer.get("success", False):
            raise EpisodeRefused(answer.get("error") or "the env server refused the episode")
        return self.assembly.finish(answer["head"], answer["traces"])


class EnvironmentClient:
    """Connection to the env server of one source.

    A plain socket whose descriptor the event loop watches: the asyncio socket of pyzmq costs
    several times as much per message. The descriptor only signals edges, so everything there is
    gets read whenever the socket has been touched.
    """

    def __init__(self, address: str, client: Mapping[str, Any]) -> None:
        self.address = address
        self._client_settings = dict(client)
        self._loop = asyncio.get_running_loop()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        for option in (zmq.SNDHWM, zmq.RCVHWM):
            self._socket.setsockopt(option, 0)
        self._socket.setsockopt(zmq.LINGER, 200)
        self._socket.connect(address)
        self._calls: dict[str, ServedEpisode] = {}
        self._healthy = asyncio.Event()
        self._descriptor = int(self._socket.getsockopt(zmq.FD))
        self._loop.add_reader(self._descriptor, self._read)

    def start(
        self, task: Mapping[str, Any], model: str, sampling: Mapping[str, Any]
    ) -> ServedEpisode:
        """See Environment.start."""
        request = _encode(
            {
                "task_data": task,
                "client": self._client_settings,
                "model": model,
                "sampling": sampling,
            }
        )
        call = ServedEpisode(self, request)
        self._calls[call.id] = call
        return call

    async def wait_healthy(self, timeout_s: float) -> None:
        """Wait until the server answers. Raises RunError."""
        deadline = self._loop.time() + timeout_s
        while not self._healthy.is_set():
            if self._loop.time() > deadline:
                raise RunError(f"the environment server at {self.address} does not answer")
            self.send(HEALTH_ID, b"health", _encode({}))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._healthy.wait(), HEALTH_INTERVAL_S)

    def send(self, request_id: str, method: bytes, payload: bytes) -> None:
        """Send one request. Without a high-water mark this never waits."""
        self._socket.send_multipart([request_id.encode(), method, payload], zmq.NOBLOCK)
        self._loop.call_soon(self._read)

    def abort(self, request_id: str) -> None:
        """Tell the server to end an episode nobody waits for."""
        if not self._socket.closed:
            payload = _encode({"request_id": request_id})
            self.send(uuid.uuid4().hex, b"cancel", payload)

    def forget(self, request_id: str) -> None:
        """The call is over."""
        self._calls.pop(request_id, None)

    def _read(self) -> None:
        """Take every message that is there."""
        while not self._socket.closed:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._take(frames)

    def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3:
            log.warning("dropped a message of %d frames from %s", len(frames), self.address)
            return
        request_id, kind, data = frames
        if request_id == HEALTH_ID.encode():
            self._healthy.set()
            return
        call = self._calls.get(request_id.decode())
        if call is None:
            return
        if kind == b"delta":
            call.assembly.apply(_decode(data))
        elif not call.reply.done():
            call.reply.set_result(data)

    async def close(self) -> None:
        """See Environment.close."""
        self._loop.remove_reader(self._descriptor)
        self._socket.close()
        self._context.term()
