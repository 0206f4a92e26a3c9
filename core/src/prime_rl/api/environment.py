"""What an environment package may import: the in-process harness that plays its tasks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult, Runtime
from verifiers.v1.types import SystemMessage, UserMessage

MAX_ERROR_CHARACTERS = 2000
"""How much of a failed call's body is kept as the program's error output."""


class InProcessHarnessConfig(vf.HarnessConfig):
    """Settings of the in-process harness; none beyond what every harness has."""


class InProcessHarness(vf.Harness[InProcessHarnessConfig]):
    """Asks the model once per segment, inside the env server's process.

    Nothing is installed or launched: the prompt goes to `endpoint` + `/chat/completions`, and the
    interception server behind it records the turn on the trace. An environment package makes it
    the default by exporting it beside its task set. A multi-turn environment drives it through
    `agent.interaction(task)`: each `turn()` replays the conversation plus the new message.
    No tools, no code execution.
    """

    APPENDS_SYSTEM_PROMPT = True
    SUPPORTS_RESUME = True
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    def __init__(self, config: InProcessHarnessConfig) -> None:
        super().__init__(config)
        self._connections: aiohttp.ClientSession | None = None
        self._calls_in_flight = 0

    async def launch(
        self,
        ctx: ModelContext,
        trace: vf.Trace,
        runtime: Runtime,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: vf.TaskData,
    ) -> ProgramResult:
        """One model call on the task's prompt; a refused or failed call is exit code 1.

        Sampling is not sent: the interception server imposes the run's own.
        """
        body = {"model": ctx.model, "messages": self._messages(data)}
        headers = {"Authorization": f"Bearer {secret}"}
        async with (
            self._shared_connections() as connections,
            connections.post(
                f"{endpoint}/chat/completions", json=body, headers=headers
            ) as response,
        ):
            text = await response.text()
        if response.status != 200:
            return ProgramResult(1, "", f"HTTP {response.status}: {text[:MAX_ERROR_CHARACTERS]}")
        return ProgramResult(0, "", "")

    def _messages(self, data: vf.TaskData) -> list[dict]:
        """The task's system prompt and prompt as chat messages."""
        system, prompt = self.resolve_prompt(data)
        messages = [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
        if system is not None:
            messages.insert(0, SystemMessage(content=system))
        return [message_to_wire(message) for message in messages]

    @asynccontextmanager
    async def _shared_connections(self) -> AsyncIterator[aiohttp.ClientSession]:
        """One connection pool for all episodes in flight, closed when the last of them ends."""
        if self._connections is None:
            self._connections = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                timeout=aiohttp.ClientTimeout(total=None),
            )
        connections = self._connections
        self._calls_in_flight += 1
        try:
            yield connections
        finally:
            self._calls_in_flight -= 1
            if self._calls_in_flight == 0:
                self._connections = None
                await connections.close()
