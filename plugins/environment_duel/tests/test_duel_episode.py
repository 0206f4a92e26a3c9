"""Real episodes of two agents: verifiers, our harness and renderer against a script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from prime_rl.algorithms.rae import RAE, RAEConfig
from prime_rl.models.tokenizers import build_tokenizer
from prime_rl.orchestrator.episode import EpisodeRequest, EpisodeResult
from prime_rl.orchestrator.group import score
from prime_rl.orchestrator.records import read_episode
from prime_rl.testing.scripted_model import scripted_environment

Messages = Sequence[Mapping[str, str]]


def greedy(messages: Messages) -> str:
    """As many as allowed."""
    return str(min(3, int(messages[-1]["content"])))


def illegal(messages: Messages) -> str:
    return "9"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("letters")
    build_tokenizer("letters", path)
    return path


def play(tokenizer: Path, script: Any, stones: int, **settings: Any) -> Any:
    """One episode with a pile of `stones`."""
    taskset = {"id": "prime_rl_environment_duel", "min_stones": stones, "max_stones": stones}

    async def run() -> Any:
        setting = scripted_environment({"taskset": taskset, **settings}, tokenizer, script)
        async with setting as (env, context, _):
            return await env.run_episode(next(iter(env.taskset)), context)

    return asyncio.run(run())


def read(episode: Any, member: int = 0) -> EpisodeResult:
    """As the orchestrator reads it."""
    request = EpisodeRequest("train", "duel", 0, group_id=0, member=member, version=0, step=1)
    return read_episode(
        episode.model_dump(),
        request,
        temperature=1.0,
        seq_len=1000,
        end_version=0,
        duration_s=0.1,
    )


def test_both_players_are_the_policy_and_have_rewards_of_their_own(tokenizer) -> None:
    episode = play(tokenizer, greedy, 8)  # 8 -> 5 -> 2 -> 0: the first player makes the last move
    assert episode.ok
    traces = {trace.agent.name: trace for trace in episode.traces}
    assert sorted(traces) == ["first", "second"]
    said = {name: [m.content for m in trace.messages] for name, trace in traces.items()}
    assert said == {"first": ["8", "3", "2", "2"], "second": ["5", "3"]}
    assert {name: trace.reward for name, trace in traces.items()} == {"first": 1, "second": 0}
    assert traces["first"].metrics == {"broke_rules": 0, "best_moves": 1.0}  # 2 -> 0
    assert traces["second"].metrics == {"broke_rules": 0, "best_moves": 0.0}  # 5 -> 2, not 4

    result = read(episode)
    assert result.outcome == "completed" and result.reward == 0.5 and result.turns == 3
    assert result.metrics["reward/first"] == 1.0 and result.metrics["reward/second"] == 0.0
    by_agent = {trace.agent: trace for trace in result.traces}
    assert {name: len(trace.samples) for name, trace in by_agent.items()} == {
        "first": 1,
        "second": 1,
    }
    assert sum(by_agent["first"].samples[0].mask) == 4  # two moves of two tokens each
    assert sum(by_agent["second"].samples[0].mask) == 2


def test_rae_compares_each_player_with_its_own_past(tokenizer) -> None:
    algorithm = RAE(RAEConfig())
    result = read(play(tokenizer, greedy, 8))
    group = score(algorithm, [result], "task")
    [episode] = group.episodes
    assert group.live == 1
    # The baselines start at 0, so the loser's advantage is exactly 0 and its tokens are left out.
    [annotation] = episode.annotations
    first = next(trace for trace in result.traces if trace.agent == "first")
    assert annotation.trace_id == first.id
    assert {a for a in annotation.advantages if a is not None} == {1.0}
    assert algorithm.state_dict()["baselines"] == pytest.approx({"first": 0.05, "second": 0.0})
    group = score(algorithm, [read(play(tokenizer, greedy, 8), member=1)], "task")
    advantages = [
        {a for a in found.advantages if a is not None} for found in group.episodes[0].annotations
    ]
    assert advantages == [{0.95}]


def test_a_move_against_the_rules_ends_the_game_before_the_other_has_spoken(tokenizer) -> None:
    episode = play(tokenizer, illegal, 8)
    [trace] = episode.traces
    assert episode.ok and trace.agent.name == "first" and trace.reward == 0.0
    assert trace.metrics == {"broke_rules": 1, "best_moves": 0} or trace.metrics == {
        "broke_rules": 1
    }
    assert read(episode).outcome == "completed"


@pytest.mark.parametrize(
    ("opponent", "stones", "reward"),
    [
        ("perfect", 7, 1.0),  # 7 -> 4 -> 3 -> 0
        ("perfect", 8, 0.0),  # 8 -> 5 -> 4 -> 1 -> 0
    ],
)
def test_a_program_may_play_second_and_leaves_no_trace(tokenizer, opponent, stones, reward) -> None:
    [trace] = play(tokenizer, greedy, stones, opponent=opponent).traces
    assert trace.agent.name == "first" and trace.reward == reward


def test_random_play_is_a_function_of_the_game(tokenizer) -> None:
    games = [play(tokenizer, greedy, 13, opponent="random") for _ in range(2)]
    said = [[m.content for m in game.traces[0].messages] for game in games]
    assert said[0] == said[1]
