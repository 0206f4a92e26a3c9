"""The published clients of `renderers` and `verifiers` against our server, routed experts and
sampling masks included."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy
import pytest

from prime_rl.models.renderers import load_renderer

MESSAGES = [{"role": "user", "content": "hello"}]


def ask(server: Any, **settings: Any) -> dict[str, Any]:
    from openai import AsyncOpenAI
    from renderers.client import generate

    renderer = load_renderer(server.setup.model_dir, "chatml")

    async def main() -> dict[str, Any]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
            result: dict[str, Any] = await generate(
                client=client,
                renderer=renderer,
                messages=MESSAGES,
                model="toy",
                extra_headers={"X-Session-ID": "trace-1"},
                **settings,
            )
            return result

    return asyncio.run(main())


def test_renderers_reads_tokens_logprobs_experts_and_masks(toy) -> None:
    sampling = {"max_tokens": 6, "temperature": 0.9, "top_p": 0.8, "seed": 4}
    result = ask(toy, sampling_params=sampling)
    prompt, completion = result["prompt_ids"], result["completion_ids"]
    assert 1 <= len(completion) <= 6
    assert len(result["completion_logprobs"]) == len(completion)
    same = toy.generate(prompt, **sampling, stop_token_ids=[])["choices"][0]
    assert same["token_ids"] == completion
    assert result["completion_logprobs"] == [e["logprob"] for e in same["logprobs"]["content"]]
    assert all(
        token in kept for token, kept in zip(completion, result["sampling_mask"], strict=True)
    )
    experts = result["routed_experts"]
    assert experts["shape"][0] == len(prompt) + len(completion) - 1


def test_verifiers_builds_its_arrays_from_them(toy) -> None:
    from verifiers.v1.types import SamplingMask

    result = ask(toy, sampling_params={"max_tokens": 5, "top_k": 3, "seed": 1})
    mask = SamplingMask.from_sampling_mask(result["sampling_mask"])
    assert mask.counts.tolist() == [3] * len(result["completion_ids"])
    assert mask.ids.dtype == numpy.int32


def test_too_long_prompts_are_found_before_they_are_sent(toy) -> None:
    from renderers.client import OverlongPromptError

    MESSAGES[0]["content"] = "x" * 200
    try:
        with pytest.raises(OverlongPromptError, match="64"):
            ask(toy, sampling_params={"max_tokens": 5})
    finally:
        MESSAGES[0]["content"] = "hello"
