"""Real episodes with several turns: verifiers, our harness and renderer against a script."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from prime_rl_environment_calculator.rows import conversation
from prime_rl_environment_calculator.sums import random_sums

from prime_rl.models.renderers import load_renderer
from prime_rl.models.tokenizers import build_tokenizer
from prime_rl.orchestrator.samples import content_roles, samples_with_paths
from prime_rl.testing.scripted_model import LOGPROB, ScriptedEngine, scripted_environment

Messages = Sequence[Mapping[str, str]]
SUMS = {
    found.text: found
    for found in random_sums(
        12, seed=0, split="train", min_operations=1, max_operations=3, max_number=99
    )
}
SETTINGS = {"taskset": {"id": "prime_rl_environment_calculator", "num_tasks": 12}}


def careful(messages: Messages) -> str:
    """Calls as the sum asks for, then answers."""
    wanted = conversation(SUMS[messages[0]["content"]])
    assert [m["content"] for m in messages] == [m["content"] for m in wanted[: len(messages)]]
    return wanted[len(messages)]["content"]


def stubborn(messages: Messages) -> str:
    """Calls for ever."""
    return "<tool_call>1 add 1</tool_call>"


def clumsy(messages: Messages) -> str:
    """Makes one call that cannot be read, then answers rightly."""
    if len(messages) == 1:
        return "<tool_call>what</tool_call>"
    return SUMS[messages[0]["content"]].answer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("letters")
    build_tokenizer("letters", path)
    return path


def play(tokenizer: Path, script: Any, **settings: Any) -> tuple[list[Any], ScriptedEngine]:
    """One episode of every task, one after another."""

    async def run() -> tuple[list[Any], ScriptedEngine]:
        setting = scripted_environment({**SETTINGS, **settings}, tokenizer, script)
        async with setting as (env, context, engine):
            return [await env.run_episode(task, context) for task in env.taskset], engine

    return asyncio.run(run())


def test_calls_are_answered_by_tool_messages_and_the_tokens_are_one_sequence(tokenizer) -> None:
    episodes, engine = play(tokenizer, careful)
    renderer = load_renderer(tokenizer, "chatml")
    requests = iter(zip(engine.prompts, engine.replies, strict=True))
    for episode, problem in zip(episodes, SUMS.values(), strict=True):
        [trace] = episode.traces
        assert episode.ok and trace.reward == 1.0 and trace.agent.name == "agent"
        count = len(problem.calls)
        assert trace.metrics == {"calls": count, "refused_calls": 0.0, "right_calls": 1.0}
        assert [m.content for m in trace.tool_messages] == list(problem.results)

        nodes = [node.model_dump() for node in trace.nodes]
        [(sample, path)] = samples_with_paths(trace.id, nodes, "sums", 1.0, 1000)
        rendered = renderer.render(conversation(problem))
        length = len(sample.token_ids)
        assert rendered.token_ids[:length] == sample.token_ids
        assert rendered.sampled_mask[:length] == sample.mask
        assert not any(rendered.sampled_mask[length:])
        assert sample.logprobs == [LOGPROB * sampled for sampled in sample.mask]
        turns = [next(requests) for _ in range(count + 1)]
        for (prompt, reply), (later, _) in zip(turns, turns[1:], strict=False):
            assert later[: len(prompt) + len(reply)] == [*prompt, *reply]

        roles = content_roles(path, length)
        text = load_text(tokenizer, sample.token_ids, roles, "tool")
        assert text == "".join(problem.results)


def load_text(tokenizer: Path, token_ids: Sequence[int], roles: Sequence[str], role: str) -> str:
    from renderers.base import load_tokenizer

    chosen = [token for token, found in zip(token_ids, roles, strict=True) if found == role]
    return load_tokenizer(str(tokenizer)).decode(chosen)


def test_an_agent_that_only_calls_is_stopped_and_has_no_answer(tokenizer) -> None:
    episodes, _ = play(tokenizer, stubborn, max_calls=2)
    for episode in episodes[:5]:
        [trace] = episode.traces
        assert episode.ok and trace.reward == 0.0
        assert trace.num_turns == 3 and trace.metrics["calls"] == 2
        assert trace.metrics["right_calls"] == 0.0


def test_a_call_that_cannot_be_read_is_answered_and_the_agent_goes_on(tokenizer) -> None:
    episodes, _ = play(tokenizer, clumsy)
    [trace] = episodes[0].traces
    assert [m.content for m in trace.tool_messages] == ["error"]
    assert trace.metrics == {"calls": 1, "refused_calls": 1, "right_calls": 0}
    assert trace.reward == 1.0  # the answer counts, not the way
