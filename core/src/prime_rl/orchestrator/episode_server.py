"""The `verifiers` env server with two messages per trace: when it opens, and when all is over.

The library streams every change of a running trace, so that somebody may watch it; nobody here
does, and comparing and sending the changes is a fifth of the server's work per short episode. The
opening message stays: it tells the session at the router that must be released should the episode
be cancelled. The wire is the library's own; its `EnvClient` works with this server.

Tied to verifiers 0.4 (`EnvServer._run`, `DeltaStreamer._changed`).
"""

from __future__ import annotations

import asyncio
from typing import Any

from verifiers.v1.serve.delta import DeltaStreamer, TraceSummary, dump, pack
from verifiers.v1.serve.server import EnvServer
from verifiers.v1.serve.types import RunRequest, RunResponse


class OpeningStreamer(DeltaStreamer):
    """Sends a trace's first state as soon as it exists and the rest when the episode ends."""

    _is_announced = False

    def _changed(self, trace: Any) -> None:
        if trace.id in self.cursors or self._is_announced:
            return
        self._is_announced = True
        super()._changed(trace)

    def _start_flush(self) -> None:
        self._is_announced = False
        super()._start_flush()


class EpisodeServer(EnvServer):
    """Serves one source's environment."""

    async def _run(self, req: RunRequest, client_id: bytes, request_id: bytes) -> RunResponse:
        context = self._context(req.client, req.model, req.sampling)
        (slot,) = self.env.slots(self._build_task(req.task_data))

        async def send(delta: dict[str, Any]) -> None:
            await self.frontend.send_multipart(
                [client_id, request_id, b"delta", pack(delta)], copy=False
            )

        async with OpeningStreamer(lambda: slot.traces, send) as streamer:
            episode = await self.env.run_slot(slot, context, self._gate, on_trace=streamer.watch)
        return RunResponse(
            head=dump(episode, exclude={"traces"}),
            traces=[
                TraceSummary(id=trace.id, nodes=len(trace.nodes), calls=len(trace.calls))
                for trace in episode.traces
            ],
        )

    def serve(self) -> None:
        """Until SIGTERM (which arrives as KeyboardInterrupt)."""
        try:
            asyncio.run(self.run())
        except KeyboardInterrupt:
            return
