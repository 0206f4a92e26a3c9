"""Real episodes of a proposer and its solvers: verifiers, our harness and renderer, a script."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from prime_rl.algorithms.hierarchical_grpo import HierarchicalGRPO, HierarchicalGRPOConfig
from prime_rl.models.tokenizers import build_tokenizer
from prime_rl.orchestrator.episode import EpisodeRequest, EpisodeResult
from prime_rl.orchestrator.group import score
from prime_rl.orchestrator.records import read_episode
from prime_rl.testing.scripted_model import Script, scripted_environment

Messages = Sequence[Mapping[str, str]]
TASKSET = {"id": "prime_rl_environment_proposer", "num_tasks": 1}


def script(ending: str, right: Sequence[bool]) -> Script:
    """Proposes the beginning and `ending`; solvers are right as `right` says, in turn."""
    verdicts = itertools.cycle(right)

    def reply(messages: Messages) -> str:
        kind, word = messages[0]["content"].split(" ")
        if kind == "invent":
            return word + ending
        return word[::-1] if next(verdicts) else "x"

    return reply


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("letters")
    build_tokenizer("letters", path)
    return path


def play(tokenizer: Path, script: Any, **settings: Any) -> Any:
    """One episode."""

    async def run() -> Any:
        setting = scripted_environment({"taskset": TASKSET, **settings}, tokenizer, script)
        async with setting as (env, context, _):
            return await env.run_episode(next(iter(env.taskset)), context)

    return asyncio.run(run())


def read(episode: Any, member: int) -> EpisodeResult:
    """As the orchestrator reads it."""
    request = EpisodeRequest("train", "words", 0, group_id=0, member=member, version=0, step=1)
    return read_episode(
        episode.model_dump(),
        request,
        temperature=1.0,
        seq_len=1000,
        end_version=0,
        duration_s=0.1,
    )


def test_the_proposer_is_paid_by_what_its_solvers_do(tokenizer) -> None:
    episode = play(tokenizer, script("cd", [True, False, False, False]))
    assert episode.ok
    proposer, *solvers = episode.traces
    word = proposer.last_reply
    assert proposer.agent.name == "proposer" and word.endswith("cd") and len(word) == 4
    assert [trace.agent.name for trace in solvers] == ["solver"] * 4
    assert sorted(trace.reward for trace in solvers) == [0, 0, 0, 1]
    assert {trace.task.data.word for trace in solvers} == {word}
    assert proposer.reward == 0.5
    assert proposer.metrics == {"valid_word": 1, "word_letters": 4}

    result = read(episode, 0)
    assert result.outcome == "completed"
    assert result.reward == pytest.approx((0.5 + 1) / 5)
    assert result.metrics["reward/proposer"] == 0.5 and result.metrics["reward/solver"] == 0.25
    assert [len(trace.samples) for trace in result.traces] == [1] * 5


@pytest.mark.parametrize("ending", ["", "1", "x" * 11])
def test_a_word_against_the_rules_is_given_to_nobody(tokenizer, ending) -> None:
    [proposer] = play(tokenizer, script(ending, [True])).traces
    assert proposer.reward == 0.0 and proposer.metrics["valid_word"] == 0.0


def test_given_words_are_solved_without_a_proposer(tokenizer) -> None:
    episode = play(tokenizer, script("", [True, False]), words="given", solvers=2)
    assert [trace.agent.name for trace in episode.traces] == ["solver"] * 2
    assert {trace.task.data.word for trace in episode.traces} == {episode.task.data.word}
    assert sorted(trace.reward for trace in episode.traces) == [0, 1]


def test_solvers_are_compared_inside_their_episode_and_proposers_across_the_group(
    tokenizer,
) -> None:
    hard = play(tokenizer, script("cd", [True, False, False, False]))  # proposal worth 0.5
    easy = play(tokenizer, script("ef", [True]))  # solved by all: worth 0
    results = [read(hard, 0), read(easy, 1)]
    group = score(HierarchicalGRPO(HierarchicalGRPOConfig()), results, "task")
    found = {
        annotation.trace_id: {a for a in annotation.advantages if a is not None}
        for episode in group.episodes
        for annotation in episode.annotations
    }
    expected = {hard.traces[0].id: {0.25}, easy.traces[0].id: {-0.25}}
    expected |= {trace.id: {trace.reward - 0.25} for trace in hard.traces[1:]}
    assert found == expected  # the solvers of the easy word agree: nothing to learn
