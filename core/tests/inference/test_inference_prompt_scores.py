"""Prompt log-probabilities of the embedded engine against one plain forward per prompt."""

from __future__ import annotations

import concurrent.futures
import math

import pytest
import torch

from prime_rl.api.batch import PackedBatch
from prime_rl.inference import prompt_scores
from prime_rl.inference.embedded import EmbeddedConfig
from prime_rl.inference.prompt_scores import score_prompts
from prime_rl.inference.sequence import SamplingParams, Sequence
from prime_rl.inference.serve import load_runner
from prime_rl.models.head import head_weight

GENERATE = "/inference/v1/generate"


def expected(served, tokens):
    """float32 log-softmax [T-1, V] after every token but the last, at temperature 1."""
    runner = load_runner(EmbeddedConfig(), served.spec, served.setup)
    with torch.inference_mode():
        batch = PackedBatch.from_documents([tokens])
        hidden = runner.plugin.forward(runner.module, batch)
        logits = hidden.float() @ head_weight(runner.module).float().T
        return logits.log_softmax(dim=-1)[:-1]


def asked(served, tokens, **sampling):
    body = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, **sampling}}
    answer = served.client.post(GENERATE, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture(params=["alone", "with experts"])
def served(request, serve_toy):
    """With experts the prompt goes on into the batch; without, one forward answers."""
    return serve_toy(return_routed_experts=request.param == "with experts")


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.3}, {"top_k": 1}, {"max_tokens": 5}])
def test_every_token_has_its_own_logprob_whatever_the_sampling(served, sampling) -> None:
    answer = asked(served, PROMPT, prompt_logprobs=0, seed=1, **sampling)
    wanted = expected(served, PROMPT)
    first, *others = answer["prompt_logprobs"]
    assert first is None and len(others) == len(PROMPT) - 1
    for place, found in enumerate(others):
        token = PROMPT[place + 1]
        assert list(found) == [str(token)]
        entry = found[str(token)]
        assert entry["logprob"] == pytest.approx(wanted[place, token].item(), abs=1e-6)
        assert entry["rank"] == int((wanted[place] >= wanted[place, token]).sum())
        assert entry["decoded_token"] is None


def test_the_completion_is_the_same_as_without(served) -> None:
    for most in (1, 4):
        plain = asked(served, PROMPT, seed=3, max_tokens=most)["choices"][0]
        scored = asked(served, PROMPT, seed=3, max_tokens=most, prompt_logprobs=0)["choices"][0]
        assert scored["token_ids"] == plain["token_ids"]
        assert scored["finish_reason"] == plain["finish_reason"]
        for one, other in zip(
            scored["logprobs"]["content"], plain["logprobs"]["content"], strict=True
        ):
            assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-6)


def test_likeliest_tokens_come_with_the_prompts_own(served) -> None:
    answer = asked(served, PROMPT, prompt_logprobs=3)
    wanted = expected(served, PROMPT)
    for place, found in enumerate(answer["prompt_logprobs"][1:]):
        own, *_ = found
        assert own == str(PROMPT[place + 1])
        likeliest = wanted[place].topk(3).indices.tolist()
        assert set(found) == {own, *map(str, likeliest)}
        for rank, token in enumerate(likeliest, 1):
            assert found[str(token)]["rank"] == rank
            assert found[str(token)]["logprob"] == pytest.approx(
                wanted[place, token].item(), abs=1e-6
            )


def test_nothing_is_scored_unless_asked(served) -> None:
    assert asked(served, PROMPT)["prompt_logprobs"] is None
    assert asked(served, [7], prompt_logprobs=0)["prompt_logprobs"] == [None]
    assert asked(served, PROMPT, prompt_logprobs=0, n=2)["usage"]["completion_tokens"] == 2


def test_a_prompt_may_fill_the_context_when_only_scored(served) -> None:
    full = [1 + place % 5 for place in range(64)]
    assert len(asked(served, full, prompt_logprobs=0)["prompt_logprobs"]) == 64
    for tokens, sampling in (
        (full, {}),
        (full, {"prompt_logprobs": 0, "max_tokens": 2}),
        ([*full, 1], {"prompt_logprobs": 0}),
    ):
        body = {"token_ids": tokens, "sampling_params": {"max_tokens": 1, **sampling}}
        answer = served.client.post(GENERATE, json=body)
        assert answer.status_code == 400 and "maximum context length is 64" in answer.text


def test_many_at_once_beside_generation(serve_toy) -> None:
    served = serve_toy(settings={"max_running": 2, "max_batch_tokens": 24})
    prompts = [[1 + (number * place) % 7 for place in range(2 + number)] for number in range(16)]
    wanted = [expected(served, tokens) for tokens in prompts]

    def ask(number):
        tokens = prompts[number // 2]
        if number % 2:
            return asked(served, tokens, max_tokens=20, ignore_eos=True)
        return asked(served, tokens, prompt_logprobs=0)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, range(32)))
    for number, answer in enumerate(answers):
        tokens = prompts[number // 2]
        if number % 2:
            assert answer["usage"]["completion_tokens"] == 20
            continue
        found = [
            entry[str(token)]["logprob"]
            for entry, token in zip(answer["prompt_logprobs"][1:], tokens[1:], strict=True)
        ]
        rows = range(len(tokens) - 1)
        theirs = [wanted[number // 2][row, tokens[row + 1]].item() for row in rows]
        assert found == pytest.approx(theirs, abs=1e-6)


def test_other_endpoints_refuse_it(toy) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": "a", "prompt_logprobs": 0}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}],
                                  "prompt_logprobs": 0}),
    ):  # fmt: skip
        answer = toy.client.post(path, json=body)
        assert answer.status_code == 400 and "prompt_logprobs" in answer.text


def scored_sequence(tokens):
    return Sequence("s", list(tokens), len(tokens), SamplingParams(1), prompt_tops=0)


def test_chunks_of_the_head_change_nothing(drive, monkeypatch) -> None:
    runner = drive().runner
    prompts = [[1, 2, 3, 4, 5], [6], [7, 8, 9]]
    with torch.inference_mode():
        whole = [scored_sequence(tokens) for tokens in prompts]
        hidden = score_prompts(runner, whole)
        monkeypatch.setattr(prompt_scores, "CHUNK_ELEMENTS", 2 * runner.vocab_size)
        parts = [scored_sequence(tokens) for tokens in prompts]
        again = score_prompts(runner, parts)
    assert hidden.shape[0] == 3 and torch.equal(hidden, again)
    for one, other, tokens in zip(whole, parts, prompts, strict=True):
        assert [[s.token for s in scores] for scores in one.prompt_scores] == [
            [], *([token] for token in tokens[1:])
        ]  # fmt: skip
        for a, b in zip(one.prompt_scores[1:], other.prompt_scores[1:], strict=True):
            assert a[0].logprob == pytest.approx(b[0].logprob, abs=1e-6)


def test_damaged_weights_are_an_error_not_a_number(drive) -> None:
    driver = drive()
    with torch.no_grad():
        for parameter in driver.runner.module.parameters():
            parameter.fill_(math.nan)
    sequence = driver.sequence("damaged", [1, 2, 3], max_tokens=1)
    sequence.prompt_tops = 0
    driver.finish(sequence)
    assert sequence.finish_reason == "error" and "not finite" in sequence.error
