"""Batches over ZeroMQ on loopback: ranks ask for {step, data_rank}, the server answers when it can.

The server is a thread with a ROUTER socket, so that a busy event loop never starves the trainer.
Only msgpack crosses the wire; a request that is anything else is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from typing import Literal

import msgspec
import zmq

from prime_rl.batches.base import (
    STEPS_KEPT,
    BatchClient,
    BatchClosed,
    BatchServer,
    BatchTimeout,
    read_address,
    write_address,
)
from prime_rl.configs.paths import StagePaths
from prime_rl.wire import RankBatch, decode_micro_batches, encode_micro_batches

log = logging.getLogger(__name__)

POLL_MS = 200
ASK_AGAIN_S = 2.0
"""A request is repeated after this long: the server may have been replaced."""
FAREWELL_S = 2.0
"""How long a closing server waits for the ranks to hear its reason."""


class Request(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A rank asks for its batch. It has no further use for earlier steps."""

    step: int
    data_rank: int
    number: int
    """Repeated in the answer."""


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """Head of an answer; the batch follows as the next frame."""

    kind: Literal["batch", "closed", "refused"]
    number: int
    reason: str = ""


class ZmqBatchServer(BatchServer):
    """Binds a free loopback port and publishes it in the stage's address file."""

    def __init__(self, paths: StagePaths, data_ranks: int) -> None:
        super().__init__(data_ranks)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        port = self._socket.bind_to_random_port("tcp://127.0.0.1")
        self._bell_address = f"inproc://bell-{id(self)}"
        self._bell = self._context.socket(zmq.PULL)
        self._bell.bind(self._bell_address)
        self._lock = threading.Lock()
        self._offers: dict[int, list[bytes]] = {}
        self._asked: dict[int, int] = dict.fromkeys(range(data_ranks), 0)
        self._waiting: dict[bytes, Request] = {}
        self._told: set[int] = set()
        self._closing: str | None = None
        self._farewell_s = 0.0
        self._thread = threading.Thread(target=self._serve, name="batches", daemon=True)
        self._thread.start()
        write_address(paths.batch_address, f"tcp://127.0.0.1:{port}")

    async def send(self, step: int, ranks: list[RankBatch]) -> None:
        """See BatchServer.send."""
        self._check(ranks)
        payloads = [encode_micro_batches(batch) for batch in ranks]
        while not self._store(step, payloads):
            await asyncio.sleep(0.02)
        self._ring()

    def _store(self, step: int, payloads: list[bytes]) -> bool:
        with self._lock:
            if self._closing is not None:
                raise RuntimeError("the batch server is closed")
            needed_from = min(self._asked.values())
            for old in [number for number in self._offers if number < needed_from]:
                del self._offers[old]
            if len(self._offers) >= STEPS_KEPT and step not in self._offers:
                return False
            self._offers[step] = payloads
            return True

    def close(self, reason: str = "") -> None:
        """See BatchServer.close."""
        with self._lock:
            if self._closing is not None:
                return
            self._closing = reason or "the orchestrator has ended"
            self._farewell_s = FAREWELL_S if reason else 0.0
        self._ring()
        self._thread.join()
        self._context.destroy()

    def _ring(self) -> None:
        """Wake the server thread; called from any other thread.

        Never waits: the thread looks up every POLL_MS by itself, and may have seen a closing and left
        before it is told.
        """
        bell = self._context.socket(zmq.PUSH)
        bell.connect(self._bell_address)
        with contextlib.suppress(zmq.Again):
            bell.send(b"", zmq.NOBLOCK)
        bell.close(linger=100)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._bell, zmq.POLLIN)
        leave_at: float | None = None
        while leave_at is None or (time.monotonic() < leave_at and not self._all_told()):
            ready = dict(poller.poll(POLL_MS))
            if self._bell in ready:
                self._bell.recv()
            if self._socket in ready:
                self._take_request(self._socket.recv_multipart())
            self._answer_waiting()
            if leave_at is None and self._closing is not None:
                leave_at = time.monotonic() + self._farewell_s
        self._socket.close()
        self._bell.close()

    def _all_told(self) -> bool:
        """Every rank has heard the farewell."""
        return len(self._told) == self.data_ranks

    def _take_request(self, frames: list[bytes]) -> None:
        try:
            identity, body = frames
            request = msgspec.msgpack.decode(body, type=Request)
        except (ValueError, msgspec.DecodeError) as error:
            log.warning("dropped a malformed request for a batch: %s", error)
            return
        if request.data_rank not in self._asked:
            reason = f"data rank {request.data_rank} asked, but there are {self.data_ranks}"
            self._reply(identity, Answer("refused", request.number, reason))
            return
        with self._lock:
            newest = max(self._asked[request.data_rank], request.step)
            self._asked[request.data_rank] = newest
        self._waiting[identity] = request

    def _answer_waiting(self) -> None:
        with self._lock:
            closing = self._closing
            offers = dict(self._offers)
        for identity, request in list(self._waiting.items()):
            if request.step in offers:
                answer = Answer("batch", request.number)
                self._reply(identity, answer, offers[request.step][request.data_rank])
            elif closing is not None:
                self._told.add(request.data_rank)
                self._reply(identity, Answer("closed", request.number, closing))
            else:
                continue
            del self._waiting[identity]

    def _reply(self, identity: bytes, answer: Answer, payload: bytes = b"") -> None:
        self._socket.send_multipart(
            [identity, msgspec.msgpack.encode(answer), payload], copy=len(payload) < 65536
        )


class ZmqBatchClient(BatchClient):
    """Asks for one step at a time; asks again when the answer is long in coming."""

    def __init__(self, paths: StagePaths, data_rank: int) -> None:
        self._address_file = paths.batch_address
        self._data_rank = data_rank
        self._context = zmq.Context()
        self._socket: zmq.Socket[bytes] | None = None
        self._address = ""
        self._number = 0

    def receive(self, step: int, timeout_s: float) -> RankBatch:
        """See BatchClient.receive."""
        deadline = time.monotonic() + timeout_s
        while True:
            socket = self._connected(deadline)
            self._number += 1
            request = Request(step, self._data_rank, self._number)
            socket.send(msgspec.msgpack.encode(request))
            ask_again_at = min(deadline, time.monotonic() + ASK_AGAIN_S)
            batch = self._await_answer(socket, self._number, ask_again_at)
            if batch is not None:
                return batch
            if time.monotonic() >= deadline:
                raise BatchTimeout(f"waited {timeout_s:g} s for the batch of step {step}")

    def _connected(self, deadline: float) -> zmq.Socket[bytes]:
        address = read_address(self._address_file, deadline)
        if self._socket is not None and address == self._address:
            return self._socket
        if self._socket is not None:
            self._socket.close(linger=0)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._address = address
        return self._socket

    def _await_answer(
        self, socket: zmq.Socket[bytes], number: int, until: float
    ) -> RankBatch | None:
        while (left_s := until - time.monotonic()) > 0:
            if not socket.poll(max(1, int(left_s * 1000))):
                return None
            head, payload = socket.recv_multipart()
            answer = msgspec.msgpack.decode(head, type=Answer)
            if answer.number != number:
                continue
            if answer.kind == "batch":
                return decode_micro_batches(payload)
            raise BatchClosed(answer.reason)
        return None

    def close(self) -> None:
        """See BatchClient.close."""
        if self._socket is not None:
            self._socket.close(linger=0)
            self._socket = None
        self._context.term()
