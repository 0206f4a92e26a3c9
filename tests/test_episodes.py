"""Episodes of a real task set through the real env server, against an engine that answers at once."""

from __future__ import annotations

import asyncio
import base64
import json
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import numpy as np
import pytest

from prime_rl.configs.orchestrator import SourceConfig
from prime_rl.models.tokenizers import build_tokenizer
from prime_rl.orchestrator.env_client import EnvironmentClient, EpisodeRefused
from prime_rl.orchestrator.episode import EpisodeRequest
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.runner import LoadedSource, ServedEpisodeRunner
from prime_rl.orchestrator.samples import content_roles
from prime_rl.orchestrator.sampling import client_settings
from prime_rl.orchestrator.tasks import environment_settings, load_tasks

SOURCE = SourceConfig.model_validate(
    {
        "name": "words",
        "env": {"taskset": {"id": "prime_rl_environment_reverse_text", "num_tasks": 4}},
        "sampling": {"max_completion_tokens": 8, "temperature": 0.5, "seed": 7},
        "group_size": 4,
    }
)
REQUEST = EpisodeRequest("train", "words", 1, group_id=3, member=2, version=9, step=10)
KEPT = [[20, 70], [21], [2, 64, 63]]


class InstantEngine:
    """Speaks /inference/v1/generate; remembers what it was asked."""

    def __init__(self) -> None:
        self.mode = "ok"
        self.requests: list[tuple[str, dict]] = []
        self.lost_connections = 0

    async def handle(self, reader, writer):
        with suppress(asyncio.IncompleteReadError, ConnectionResetError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                headers = {
                    key.lower(): value
                    for key, value in (
                        line.split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line
                    )
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                if "/generate" not in head:
                    self.answer(writer, {"data": [{"id": "tiny", "max_model_len": 256}]})
                    continue
                request = json.loads(body)
                self.requests.append((headers["x-session-id"], request))
                if self.mode == "hang":
                    if await reader.read(1) == b"":
                        self.lost_connections += 1
                    return
                if self.mode == "busy":
                    self.answer(writer, {"error": {"message": "overloaded"}}, "503 Busy")
                else:
                    self.answer(writer, self.completion(request))
        writer.close()

    def completion(self, request):
        end = request["sampling_params"]["stop_token_ids"][0]
        ids = [20, 21, end] if self.mode == "ok" else [20, 21, 22]
        count = len(request["token_ids"]) + len(ids)
        routes = np.arange((count - 1) * 4, dtype=np.uint8).reshape(count - 1, 2, 2)
        choice = {
            "index": 0,
            "token_ids": ids,
            "finish_reason": "stop" if self.mode == "ok" else "length",
            "logprobs": {
                "content": [
                    {"token": f"token_id:{i}", "logprob": -0.123456789, "top_logprobs": []}
                    for i in ids
                ]
            },
            "routed_experts": {
                "data": base64.b64encode(routes.tobytes()).decode(),
                "shape": list(routes.shape),
                "dtype": "uint8",
                "start": 0,
            },
            "sampling_mask": [*KEPT[:2], [ids[2], *KEPT[2][1:]]],
        }
        return {"request_id": "r", "model": "tiny", "choices": [choice]}

    def answer(self, writer, content, status="200 OK"):
        data = json.dumps(content, separators=(",", ":")).encode()
        head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
        writer.write(head.encode() + b"\r\n\r\n" + data)


@asynccontextmanager
async def world(tokenizer, timeout_s=30.0):
    """Engine, env server, client and runner in one event loop."""
    from verifiers.v1.utils.loaders import resolve_env_config

    from prime_rl.orchestrator.episode_server import EpisodeServer

    engine = InstantEngine()
    http = await asyncio.start_server(engine.handle, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{http.sockets[0].getsockname()[1]}"
    server = EpisodeServer(
        resolve_env_config(environment_settings(SOURCE)), address="tcp://127.0.0.1:0"
    )
    serving = asyncio.create_task(server.run())
    client = EnvironmentClient(server.address, client_settings(url, tokenizer, "chatml"))
    released: list[str] = []
    tasks = await asyncio.to_thread(load_tasks, SOURCE)
    runner = ServedEpisodeRunner(
        {("train", "words"): LoadedSource(SOURCE, tasks, client)},
        Policy(version=11, published=11, model="tiny"),
        released.extend,
        seq_len=64,
        timeout_s=timeout_s,
    )
    try:
        await client.wait_healthy(60)
        yield engine, server, client, runner, released
    finally:
        await client.close()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        http.close()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer("letters", directory)
    return directory


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 120))


def test_an_episode_comes_back_with_its_tokens(tokenizer):
    async def scenario():
        async with world(tokenizer) as (engine, _, _, runner, released):
            return engine, released, await runner.run(REQUEST)

    engine, released, result = run(scenario())
    [(session, request)] = engine.requests
    [trace] = result.traces
    assert result.outcome == "completed" and result.error == ""
    assert session == trace.id and released == [trace.id]
    assert request["cache_salt"] == "9"
    sent = request["sampling_params"]
    assert (sent["temperature"], sent["max_tokens"], sent["seed"]) == (0.5, 8, 7 + 3 * 4 + 2)
    [sample] = trace.samples
    assert sample.token_ids == [*request["token_ids"], 20, 21, sent["stop_token_ids"][0]]
    prompt = len(request["token_ids"])
    assert sample.mask == [False] * prompt + [True] * 3
    assert sample.logprobs == [0.0] * prompt + [-0.123456789] * 3
    assert sample.temperatures == [0.5] * (prompt + 3)
    assert result.turns == 1 and result.output_tokens == 3 and result.input_tokens == prompt
    assert result.end_version == 11


def test_tokens_have_the_roles_that_the_renderer_says(tokenizer):
    from renderers.base import load_tokenizer

    async def scenario():
        async with world(tokenizer) as (_, _, _, runner, _):
            return await runner.run(REQUEST), runner

    result, runner = run(scenario())
    [trace] = result.traces
    [sample], [path] = trace.samples, trace.paths
    roles = content_roles(path, len(sample.token_ids))
    asked = [t for t, role in zip(sample.token_ids, roles, strict=True) if role == "user"]
    task = runner._sources["train", "words"].tasks[REQUEST.task_index]
    assert load_tokenizer(str(tokenizer)).decode(asked) == task.data["prompt"]
    assert [role == "assistant" for role in roles] == sample.mask
    assert set(roles) == {"", "user", "assistant"}


def test_a_frozen_model_plays_under_its_own_name(tokenizer):
    async def scenario():
        async with world(tokenizer) as (engine, _, _, runner, _):
            source = runner._sources["train", "words"]
            runner._sources["train", "words"] = replace(source, frozen_model="big")
            return engine, await runner.run(REQUEST)

    engine, result = run(scenario())
    [(_, request)] = engine.requests
    assert request["model"] == "big" and request["cache_salt"] == "frozen"
    assert request["sampling_params"]["temperature"] == 0.5
    [sample] = result.traces[0].samples
    assert sample.routed_experts is None and sample.sampling_mask is None
    assert set(sample.temperatures) == {1.0} and sum(sample.mask) == 3


def test_routes_and_sampling_masks_stay_on_their_tokens(tokenizer):
    async def scenario():
        async with world(tokenizer) as (_, _, _, runner, _):
            return await runner.run(REQUEST)

    [trace] = run(scenario()).traces
    [sample] = trace.samples
    count = len(sample.token_ids)
    routes = np.frombuffer(sample.routed_experts.data, np.uint8).reshape(count, 2, 2)
    expected = np.arange((count - 1) * 4, dtype=np.uint8).reshape(count - 1, 2, 2)
    assert (routes[:-1] == expected).all() and (routes[-1] == 255).all()
    counts = np.frombuffer(sample.sampling_mask.counts, np.int32).tolist()
    assert counts == [0] * (count - 3) + [2, 1, 3]
    ids = np.frombuffer(sample.sampling_mask.ids, np.int32).tolist()
    assert ids == [20, 70, 21, sample.token_ids[-1], 64, 63]


def test_a_length_stop_is_an_outcome_of_its_own(tokenizer):
    async def scenario():
        async with world(tokenizer) as (engine, _, _, runner, _):
            engine.mode = "length"
            return await runner.run(REQUEST)

    result = run(scenario())
    assert result.outcome == "truncated" and len(result.traces[0].samples) == 1


def test_a_refusing_engine_is_an_error_outcome(tokenizer, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.runner.FAILED_EPISODE_S", 0.0)

    async def scenario():
        async with world(tokenizer) as (engine, _, _, runner, released):
            engine.mode = "busy"
            return engine, released, await runner.run(REQUEST)

    engine, released, result = run(scenario())
    assert result.outcome == "error" and "overloaded" in result.error
    assert all(not trace.samples for trace in result.traces)
    assert released == [engine.requests[0][0]]


@pytest.mark.parametrize("how", ["cancelled", "timeout"])
def test_an_abandoned_episode_ends_on_the_engine_and_releases_its_session(tokenizer, how):
    async def scenario():
        timeout_s = 1.5 if how == "timeout" else 60.0
        async with world(tokenizer, timeout_s) as (engine, server, _, runner, released):
            engine.mode = "hang"
            task = asyncio.create_task(runner.run(REQUEST))
            if how == "cancelled":
                while not engine.requests:
                    await asyncio.sleep(0.01)
                task.cancel()
            [outcome] = await asyncio.gather(task, return_exceptions=True)
            while not engine.lost_connections or server._running:
                await asyncio.sleep(0.01)
            return engine, released, outcome

    engine, released, outcome = run(scenario())
    assert released == [engine.requests[0][0]]
    if how == "cancelled":
        assert isinstance(outcome, asyncio.CancelledError)
    else:
        assert outcome.outcome == "timeout"


def test_a_request_that_the_server_refuses_says_why(tokenizer):
    async def scenario():
        async with world(tokenizer) as (_, _, client, _, _):
            await client.start({"nonsense": 1}, "tiny", {}).result()

    with pytest.raises(EpisodeRefused, match="ValidationError"):
        run(scenario())


def test_the_library_s_own_client_works_with_the_server(tokenizer):
    async def scenario():
        import verifiers.v1 as vf
        from verifiers.v1.serve.client import EnvClient

        async with world(tokenizer) as (engine, server, client, runner, _):
            theirs = EnvClient(server.address)
            data = runner._sources["train", "words"].tasks[0].data
            episode = await theirs.run(
                vf.TrainClientConfig(**client._client_settings),
                "tiny",
                vf.SamplingConfig(temperature=1.0, max_tokens=8),
                data,
            )
            await theirs.close()
            return episode

    episode = run(scenario())
    assert episode.ok and episode.traces[0].branches[0].sampled_mask[-3:] == [True] * 3
