"""Real episodes in this process: verifiers, our harness and renderer against a small HTTP engine."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import verifiers.v1 as vf
from verifiers.v1.clients import ModelContext
from verifiers.v1.envs.single_agent import SingleAgentEnv
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

from prime_rl.models.renderers import renderer_settings
from prime_rl.models.tokenizers import build_tokenizer

START, END = 257, 258  # of the byte tokenizer, whose other ids are the bytes

Answer = Callable[[bytes], list[int]]
"""From the last user message to the ids of the reply."""


def perfect(message: bytes) -> list[int]:
    return [*message.removeprefix(b"reverse ")[::-1], END]


def one_letter_missing(message: bytes) -> list[int]:
    return [*message.removeprefix(b"reverse ")[::-1][:-1], END]


class Engine:
    """Answers `/inference/v1/generate` as an engine does; `status` other than 200 is an error."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.status = 200
        self.requests: list[tuple[dict[str, str], dict[str, Any]]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                first, *lines = head.decode().strip().split("\r\n")
                headers = {k.lower(): v for k, v in (line.split(": ", 1) for line in lines)}
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                reply = json.dumps(self.respond(first, headers, body)).encode()
                status = self.status if "/generate" in first else 200
                writer.write(
                    f"HTTP/1.1 {status} status\r\ncontent-type: application/json\r\n"
                    f"content-length: {len(reply)}\r\n\r\n".encode()
                    + reply
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionResetError):
            pass
        finally:
            writer.close()

    def respond(self, first: str, headers: dict[str, str], body: bytes) -> dict[str, Any]:
        if "/generate" not in first:
            return {"object": "list", "data": [{"id": "tiny", "max_model_len": 512}]}
        request = json.loads(body)
        self.requests.append((headers, request))
        if self.status != 200:
            return {"error": {"message": "no room"}}
        text = bytes(token if token < 256 else 0 for token in request["token_ids"])
        ids = self.answer(text.split(b"user\n")[-1].split(b"\0")[0])
        content = [{"token": f"token_id:{i}", "logprob": -0.1 * n} for n, i in enumerate(ids, 1)]
        choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
        return {"request_id": "r", "choices": [{"index": 0, **choice}]}


@asynccontextmanager
async def environment(
    engine: Engine, tokenizer: Path, env: type[SingleAgentEnv] | None = None, **agent: Any
) -> AsyncIterator[tuple[SingleAgentEnv, ModelContext]]:
    server = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    taskset = {"id": "prime_rl_environment_reverse_text", "num_tasks": 64}
    agent = {"runtime": {"type": "subprocess"}, **agent}
    config = resolve_env_config({"taskset": taskset, "agent": agent})
    client = vf.TrainClientConfig(
        base_url=f"http://127.0.0.1:{port}/v1",
        api_key_var="PRIME_RL_API_KEY",
        renderer=renderer_settings("chatml"),
        renderer_model_name=str(tokenizer),
    )
    sampling = vf.SamplingConfig(temperature=0.7, max_tokens=16, cache_salt="v3")
    loaded = env(config) if env else load_environment(config)
    async with loaded.serving():
        yield loaded, ModelContext(model="tiny", client=client, sampling=sampling)
    server.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bytes")
    build_tokenizer("bytes", path)
    return path


def test_an_episode_scores_the_reply_and_keeps_its_tokens(tokenizer: Path) -> None:
    async def play() -> None:
        engine = Engine(one_letter_missing)
        async with environment(engine, tokenizer) as (env, context):
            task = next(iter(env.taskset))
            episode = await env.run_episode(task, context)
        (trace,) = episode.traces
        word, length = task.data.name, len(task.data.name)
        assert episode.ok and trace.ok and trace.stop_condition == "agent_completed"
        assert trace.last_reply == word[::-1][:-1]
        assert trace.reward == pytest.approx((length - 1) / length)
        assert trace.metrics == {"exact_match": 0.0}

        (branch,) = trace.branches
        prompt = [START, *f"user\nreverse {word}".encode(), END, 10, START, *b"assistant\n"]
        reply = [*word[::-1][:-1].encode(), END]
        assert branch.token_ids == prompt + reply
        assert branch.sampled_mask == [False] * len(prompt) + [True] * len(reply)
        expected = [0.0] * len(prompt) + [-0.1 * n for n in range(1, length + 1)]
        assert branch.logprobs == pytest.approx(expected)
        body = [flag for node in branch.nodes for flag in node.is_content]
        assert (
            bytes(t for t, f in zip(prompt, body, strict=False) if f).decode() == task.data.prompt
        )

        ((headers, request),) = engine.requests
        assert request["token_ids"] == prompt
        assert request["cache_salt"] == "v3" and request["model"] == "tiny"
        assert request["sampling_params"]["stop_token_ids"] == [END]
        assert request["sampling_params"]["temperature"] == 0.7
        assert headers["x-session-id"] == trace.id

    asyncio.run(play())


def test_many_episodes_at_once_all_succeed_and_leave_no_connection(tokenizer: Path) -> None:
    async def play() -> None:
        engine = Engine(perfect)
        async with environment(engine, tokenizer) as (env, context):
            episodes = await asyncio.gather(
                *(env.run_episode(task, context) for task in env.taskset)
            )
            harness = env._harnesses["agent"]
            assert type(harness).__name__ == "InProcessHarness"
            assert harness._connections is None and harness._calls_in_flight == 0
        assert [trace.reward for episode in episodes for trace in episode.traces] == [1.0] * 64
        sessions = {headers["x-session-id"] for headers, _ in engine.requests}
        assert sessions == {trace.id for episode in episodes for trace in episode.traces}

    asyncio.run(play())


def test_an_engine_error_is_a_failed_episode_with_its_status(tokenizer: Path) -> None:
    async def play() -> None:
        engine = Engine(perfect)
        engine.status = 503
        async with environment(engine, tokenizer) as (env, context):
            episode = await env.run_episode(next(iter(env.taskset)), context)
        (trace,) = episode.traces
        assert not episode.ok and trace.stop_condition == "provider_error"
        assert [(error.type, error.status_code) for error in trace.errors] == [
            ("ProviderError", 503)
        ]
        assert trace.branches == [] and trace.reward == 0.0
        assert len(engine.requests) == 1  # nothing is tried again behind the orchestrator's back

    asyncio.run(play())


class AskTwice(SingleAgentEnv):
    """Answers the first reply with one more word."""

    async def run(self, task: vf.Task, agents: Any) -> None:
        async with agents.agent.interaction(task) as talk:
            await talk.turn()
            await talk.turn("reverse xyz")


@pytest.mark.parametrize("max_turns", [None, 1])
def test_a_second_turn_extends_the_tokens_of_the_first(
    tokenizer: Path, max_turns: int | None
) -> None:
    async def play() -> None:
        engine = Engine(perfect)
        setting = environment(engine, tokenizer, env=AskTwice, max_turns=max_turns)
        async with setting as (env, context):
            episode = await env.run_episode(next(iter(env.taskset)), context)
        (trace,) = episode.traces
        assert trace.ok and trace.num_turns == (max_turns or 2)
        if max_turns:
            assert trace.stop_condition == "max_turns"
            return
        (branch,) = trace.branches
        first, second = (request["token_ids"] for _, request in engine.requests)
        reply = perfect(trace.task.data.prompt.encode())
        ask = [10, START, *b"user\nreverse xyz", END, 10, START, *b"assistant\n"]
        assert second == [*first, *reply, *ask]
        assert branch.token_ids == [*second, *b"zyx", END]
        marks = [False] * len(first) + [True] * len(reply) + [False] * len(ask) + [True] * 4
        assert branch.sampled_mask == marks

    asyncio.run(play())
