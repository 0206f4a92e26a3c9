"""Plays an environment's episodes against a script instead of a model: real tokens, no weights."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

TURN_START, TURN_END = "<|im_start|>", "<|im_end|>"
LOGPROB = -0.5
"""Log-probability that the script gives every token of its replies."""

Script = Callable[[Sequence[Mapping[str, str]]], str]
"""(messages so far, each with `role` and `content`) -> the reply."""


class ScriptedEngine:
    """Answers `/inference/v1/generate` as an engine does, with what the script says."""

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self._tokenizer = tokenizer
        self._script = script
        self._end = tokenizer.convert_tokens_to_ids(TURN_END)
        self.prompts: list[list[int]] = []
        """Token ids of every request, in order."""
        self.replies: list[list[int]] = []
        """Token ids of every answer."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                lines = head.decode().lower().split("\r\n")
                lengths = [int(line[15:]) for line in lines if line.startswith("content-length:")]
                body = await reader.readexactly(sum(lengths))
                answer = json.dumps(self._answer(lines[0], body)).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
                    + f"content-length: {len(answer)}\r\n\r\n".encode()
                    + answer
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            writer.close()

    def _answer(self, first_line: str, body: bytes) -> dict[str, Any]:
        if "/generate" not in first_line:
            return {"object": "list", "data": [{"id": "script", "max_model_len": 100_000}]}
        request = json.loads(body)
        prompt = request["token_ids"]
        text = self._tokenizer.decode(prompt, skip_special_tokens=False)
        reply = [
            *self._tokenizer.encode(self._script(messages_of(text)), add_special_tokens=False),
            self._end,
        ]
        most = request["sampling_params"].get("max_tokens") or len(reply)
        is_cut, reply = len(reply) > most, reply[:most]
        self.prompts.append(prompt)
        self.replies.append(reply)
        content = [{"token": f"token_id:{token}", "logprob": LOGPROB} for token in reply]
        choice = {
            "index": 0,
            "token_ids": reply,
            "finish_reason": "length" if is_cut else "stop",
            "logprobs": {"content": content},
        }
        return {"request_id": "script", "choices": [choice]}


def messages_of(text: str) -> list[dict[str, str]]:
    """The messages of a ChatML prompt, without the header of the reply it asks for."""
    messages = []
    for turn in text.split(TURN_START)[1:]:
        body, end, _ = turn.partition(TURN_END)
        if end:
            role, _, content = body.partition("\n")
            messages.append({"role": role, "content": content})
    return messages


@asynccontextmanager
async def scripted_environment(
    settings: Mapping[str, Any], tokenizer: Path, script: Script, max_tokens: int = 64
) -> AsyncIterator[tuple[Any, Any, ScriptedEngine]]:
    """Environment, model context and engine: `await env.run_episode(task, context)` plays one.

    `settings` is the `env` table of a source, `tokenizer` a folder with a ChatML tokenizer. Programs
    run in this process.
    """
    import verifiers.v1 as vf
    from renderers.base import load_tokenizer
    from verifiers.v1.clients import ModelContext
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    config = resolve_env_config(dict(settings))
    here = {name: {"runtime": {"type": "subprocess"}} for name in agent_config_fields(config)}
    environment = load_environment(resolve_env_config({**here, **settings}))
    engine = ScriptedEngine(load_tokenizer(str(tokenizer)), script)
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client = vf.TrainClientConfig(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key_var="PRIME_RL_API_KEY",
        renderer={"name": "custom", "import_path": "prime_rl.models.chatml.ChatMLRenderer"},
        renderer_model_name=str(tokenizer),
    )
    sampling = vf.SamplingConfig(temperature=1.0, max_tokens=max_tokens)
    try:
        async with environment.serving():
            yield (
                environment,
                ModelContext(model="script", client=client, sampling=sampling),
                engine,
            )
    finally:
        server.close()
