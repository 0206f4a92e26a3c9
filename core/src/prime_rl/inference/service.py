"""The server's side of the engine: hands sequences over and waits for them, from asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from prime_rl.inference.admission import Limits
from prime_rl.inference.engine_loop import (
    ENDED,
    EngineLoop,
    EngineStopped,
    Progress,
    QueueFull,
)
from prime_rl.inference.protocol import RequestError
from prime_rl.inference.sequence import Sequence
from prime_rl.inference.text import TextTokenizer
from prime_rl.inference.weights import WeightUpdater

Receive = Callable[[], Awaitable[dict[str, Any]]]

RETRY_AFTER_S = 1


class ClientGone(Exception):
    """The client hung up; nobody reads an answer."""


class EngineService:
    """Everything the HTTP routes need."""

    def __init__(
        self,
        loop: EngineLoop,
        limits: Limits,
        tokenizer: TextTokenizer,
        weights: WeightUpdater,
        max_body_bytes: int,
    ) -> None:
        self.loop = loop
        self.limits = limits
        self.tokenizer = tokenizer
        self.weights = weights
        self.max_body_bytes = max_body_bytes

    @property
    def problem(self) -> str | None:
        """Why this engine cannot generate; None when it can."""
        return self.loop.failure or self.weights.damage

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences. Raises RequestError when they cannot be taken."""
        if self.problem is not None:
            raise RequestError(503, f"this engine cannot generate: {self.problem}")
        try:
            self.loop.submit(sequences)
        except QueueFull as error:
            raise RequestError(503, f"overloaded: {error}", RETRY_AFTER_S) from None
        except EngineStopped as error:
            raise RequestError(503, f"this engine cannot generate: {error}") from None

    async def complete(self, sequences: list[Sequence], receive: Receive) -> None:
        """Run sequences to their end. Raises ClientGone when the client leaves before, and
        RequestError when the engine fails."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        missing = len(sequences)

        def finished(_: Sequence) -> None:
            nonlocal missing
            missing -= 1
            if missing == 0 and not done.done():
                done.set_result(None)

        for sequence in sequences:
            sequence.finished = finished
        self.submit(sequences)
        hangup = asyncio.ensure_future(_hangup(receive))
        try:
            await asyncio.wait({done, hangup}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise ClientGone
        finally:
            hangup.cancel()
            if not done.done():
                self.cancel(sequences)
        for sequence in sequences:
            if sequence.finish_reason == "error":
                status = 500 if self.loop.failure is None else 503
                raise RequestError(status, f"generation failed: {sequence.error}")

    def stream(self, sequences: list[Sequence]) -> AsyncGenerator[Progress, None]:
        """(sequence, tokens it has or ENDED) as steps end; leaving the iterator early cancels.

        Raises RequestError at once when the sequences cannot be taken.
        """
        queue: asyncio.Queue[Progress] = asyncio.Queue()
        for sequence in sequences:
            sequence.notify = lambda s, length: queue.put_nowait((s, length))
            sequence.finished = lambda s: queue.put_nowait((s, ENDED))
        self.submit(sequences)
        return self._drain(sequences, queue)

    async def _drain(
        self, sequences: list[Sequence], queue: asyncio.Queue[Progress]
    ) -> AsyncGenerator[Progress, None]:
        missing = len(sequences)
        try:
            while missing:
                progress = await queue.get()
                missing -= progress[1] == ENDED
                yield progress
        finally:
            if missing:
                self.cancel(sequences)

    def cancel(self, sequences: list[Sequence]) -> None:
        """End sequences nobody waits for."""
        leaving = {id(sequence) for sequence in sequences}
        self.loop.abort(lambda sequence: id(sequence) in leaving)

    @staticmethod
    def dispatch(progress: list[Progress]) -> None:
        """Tell the owners of sequences; runs in the server's thread once per step."""
        for sequence, length in progress:
            if length == ENDED:
                if sequence.finished is not None:
                    sequence.finished(sequence)
            elif sequence.notify is not None:
                sequence.notify(sequence, length)


async def _hangup(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
