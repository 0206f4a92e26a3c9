"""Episodes of several agents through the real env server: every trace arrives and is released."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from renderers.base import load_tokenizer
from verifiers.v1.utils.loaders import resolve_env_config

from prime_rl.configs.orchestrator import SourceConfig
from prime_rl.models.tokenizers import build_tokenizer
from prime_rl.orchestrator.env_client import EnvironmentClient
from prime_rl.orchestrator.episode import EpisodeRequest, EpisodeResult
from prime_rl.orchestrator.episode_server import EpisodeServer
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.runner import LoadedSource, ServedEpisodeRunner
from prime_rl.orchestrator.sampling import client_settings
from prime_rl.orchestrator.tasks import environment_settings, load_tasks
from prime_rl.testing.scripted_model import Script, ScriptedEngine

RUNTIME = {"type": "subprocess"}


def source(**env: object) -> SourceConfig:
    return SourceConfig.model_validate(
        {"name": "agents", "env": env, "sampling": {"max_completion_tokens": 12}, "group_size": 2}
    )


DUEL = source(taskset={"id": "prime_rl_environment_duel", "min_stones": 8, "max_stones": 8})
PROPOSER = source(taskset={"id": "prime_rl_environment_proposer", "num_tasks": 1}, solvers=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("letters")
    build_tokenizer("letters", path)
    return path


def play(
    config: SourceConfig, tokenizer: Path, script: Script, count: int = 4
) -> tuple[list[EpisodeResult], list[str]]:
    """Results of `count` episodes, all but the first at once, and the sessions released."""

    async def run() -> tuple[list[EpisodeResult], list[str]]:
        engine = ScriptedEngine(load_tokenizer(str(tokenizer)), script)
        http = await asyncio.start_server(engine.serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{http.sockets[0].getsockname()[1]}"
        environment = resolve_env_config(environment_settings(config))
        server = EpisodeServer(environment, address="tcp://127.0.0.1:0")
        serving = asyncio.create_task(server.run())
        client = EnvironmentClient(server.address, client_settings(url, tokenizer, "chatml"))
        released: list[str] = []
        runner = ServedEpisodeRunner(
            {("train", "agents"): LoadedSource(config, load_tasks(config), client)},
            Policy(version=3, published=3, model="script"),
            released.extend,
            seq_len=200,
            timeout_s=60.0,
        )
        try:
            await client.wait_healthy(60)
            requests = [
                EpisodeRequest("train", "agents", 0, group_id=0, member=member, version=3, step=4)
                for member in range(count)
            ]
            # Alone, because the library asks for the engine's models under a lock that belongs to
            # the first event loop which waits for it.
            first = await runner.run(requests[0])
            return [first, *await asyncio.gather(*map(runner.run, requests[1:]))], released
        finally:
            await client.close()
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)
            http.close()

    return asyncio.run(run())


def test_both_players_of_a_game_arrive(tokenizer):
    results, released = play(DUEL, tokenizer, lambda messages: "2")  # 8, 6, 4, 2: the second wins
    for result in results:
        assert result.outcome == "completed", result.error
        rewards = {trace.agent: trace.reward for trace in result.traces}
        assert rewards == {"first": 0.0, "second": 1.0}
        assert [len(trace.samples) for trace in result.traces] == [1, 1]
        assert result.metrics["reward/second"] == 1.0 and result.turns == 4
    assert sorted(released) == sorted(trace.id for r in results for trace in r.traces)


def test_a_proposer_and_its_solvers_arrive(tokenizer):
    def script(messages):
        kind, word = messages[0]["content"].split(" ")
        return f"{word}x" if kind == "invent" else word[::-1]

    results, released = play(PROPOSER, tokenizer, script)
    for result in results:
        assert result.outcome == "completed", result.error
        assert [trace.agent for trace in result.traces] == ["proposer"] + ["solver"] * 3
        assert [trace.reward for trace in result.traces] == [0.0, 1.0, 1.0, 1.0]
    assert sorted(released) == sorted(trace.id for r in results for trace in r.traces)


def test_programs_of_every_agent_run_here_unless_the_recipe_says_otherwise():
    settings = environment_settings(DUEL)
    assert settings["first"] == settings["second"] == {"runtime": RUNTIME}
    assert "agent" not in settings
    hosted = source(taskset=DUEL.env["taskset"], second={"runtime": {"type": "docker"}})
    settings = environment_settings(hosted)
    assert settings["first"] == {"runtime": RUNTIME}
    assert settings["second"] == {"runtime": {"type": "docker"}}
    limited = source(taskset=DUEL.env["taskset"], first={"max_turns": 2})
    assert environment_settings(limited)["first"] == {"runtime": RUNTIME, "max_turns": 2}
