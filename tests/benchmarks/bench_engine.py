"""The embedded engine against `transformers` generate on the same tiny model, in one run.

Ways are measured in turn, round after round, so that a busy machine hits all: shown are the best
round of each, and the median over the rounds of its ratio to transformers in the same round.
`direct`: sequences given to the engine loop; `http`: requests of an aiohttp client in this process
to a server process.

    python tests/benchmarks/bench_engine.py [--tokens 128] [--rounds 5] [--threads 1]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import torch

from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import FreshModelConfig, ModelConfig
from prime_rl.inference.engine_loop import ENDED, EngineLoop
from prime_rl.inference.runner import ModelRunner
from prime_rl.inference.sequence import SamplingParams, Sequence
from prime_rl.models.fresh import make_fresh_model
from prime_rl.models.load import load_weights
from prime_rl.models.setup import ModelSetup, build, prepare
from prime_rl.plugins import scan
from prime_rl.testing.served_engine import serve_engine

ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
PROMPT_TOKENS = 32
GOALS = {1: 4.0, 16: 1.5}
"""Batch size -> least ratio of the engine's tokens/s to those of transformers."""


def make_model(directory: Path) -> ModelSetup:
    """A checkpoint with random weights."""
    registry = scan()
    context = ValidationContext(registry.config_class)
    section = ModelConfig.model_validate({"name": str(directory)}, context=context)
    make_fresh_model(FreshModelConfig(architecture=ARCHITECTURE), section, directory, registry)
    return prepare(section, directory, registry)


class Transformers:
    """`generate` with sampling, on a batch of equal prompts."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def __call__(self, batch: int, tokens: int) -> None:
        prompt = torch.arange(PROMPT_TOKENS).repeat(batch, 1)
        with torch.inference_mode():
            out = self.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=True,
                top_k=0,
                max_new_tokens=tokens,
                min_new_tokens=tokens,
                pad_token_id=0,
            )
        assert out.shape[1] == PROMPT_TOKENS + tokens


class Direct:
    """The engine loop without a server."""

    def __init__(self, setup: ModelSetup, use_decode_cache: bool) -> None:
        module = build(setup)
        load_weights(module, setup.layout, setup.model_dir, "cpu")
        module.eval().requires_grad_(False)
        runner = ModelRunner(
            setup.plugin,
            setup.architecture,
            module,
            setup.layout,
            max_running=64,
            max_model_len=1024,
            max_batch_tokens=8192,
            use_decode_cache=use_decode_cache,
        )
        self.missing = 0
        self.ended = threading.Event()
        self.loop = EngineLoop(
            runner,
            max_running=64,
            max_queue=1000,
            max_batch_tokens=8192,
            max_model_len=1024,
            deliver=self.deliver,
        )
        self.loop.start()

    def deliver(self, progress: list[tuple[Sequence, int]]) -> None:
        self.missing -= sum(length == ENDED for _, length in progress)
        if self.missing == 0:
            self.ended.set()

    def __call__(self, batch: int, tokens: int) -> None:
        self.missing = batch
        self.ended.clear()
        self.loop.submit(
            [
                Sequence(
                    str(number),
                    list(range(PROMPT_TOKENS)),
                    PROMPT_TOKENS,
                    SamplingParams(max_tokens=tokens, seed=number),
                )
                for number in range(batch)
            ]
        )
        self.ended.wait()


class HTTP:
    """Concurrent requests to a server in another process, over kept connections."""

    def __init__(self, url: str) -> None:
        self.url = f"{url}/inference/v1/generate"
        self.events = asyncio.new_event_loop()
        self.client = self.events.run_until_complete(self.connect())

    async def connect(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))

    def close(self) -> None:
        self.events.run_until_complete(self.client.close())

    def __call__(self, batch: int, tokens: int) -> None:
        calls = [self.ask(seed, tokens) for seed in range(batch)]
        self.events.run_until_complete(self.all(calls))

    async def all(self, calls: list[Any]) -> None:
        await asyncio.gather(*calls)

    async def ask(self, seed: int, tokens: int) -> None:
        sampling = {"max_tokens": tokens, "seed": seed, "ignore_eos": True, "logprobs": 1}
        body = {"token_ids": list(range(PROMPT_TOKENS)), "sampling_params": sampling}
        async with self.client.post(self.url, json=body) as answer:
            content = json.loads(await answer.read())
        assert len(content["choices"][0]["token_ids"]) == tokens


def measure(
    ways: dict[str, Callable[[int, int], None]], batch: int, tokens: int, rounds: int
) -> dict[str, list[float]]:
    """tokens/s of each way in each round. Each is called once before it counts: while the others
    ran, its weights have left the caches, and an idle process has lost its core."""
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            way(batch, tokens)
            started = time.perf_counter()
            way(batch, tokens)
            rates[name].append(batch * tokens / (time.perf_counter() - started))
    return rates


def ratio(rates: dict[str, list[float]], name: str) -> float:
    """Median over the rounds of a way's rate to that of transformers."""
    pairs = zip(rates[name], rates["transformers"], strict=True)
    return statistics.median(value / base for value, base in pairs)


def main() -> int:
    """Print the table; 1 when a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        setup = make_model(Path(folder) / "model")
        with serve_engine(setup.model_dir) as server:
            ways: dict[str, Any] = {
                "transformers": Transformers(setup.model_dir),
                "direct": Direct(setup, use_decode_cache=True),
                "http": HTTP(server.url),
                "recompute": Direct(setup, use_decode_cache=False),
            }
            print(f"{'batch':>5} " + " ".join(f"{name:>14}" for name in ways) + "   tokens/s")
            for batch in options.batches:
                rates = measure(ways, batch, options.tokens, options.rounds)
                print(f"{batch:>5} " + " ".join(f"{max(found):>14.0f}" for found in rates.values()))
                ratios = " ".join(f"{ratio(rates, name):>13.2f}x" for name in ways)
                goal = GOALS.get(batch)
                verdict = ""
                if goal is not None:
                    is_met = min(ratio(rates, "direct"), ratio(rates, "http")) >= goal
                    missed |= not is_met
                    verdict = f"   goal {goal:g}x: {'met' if is_met else 'MISSED'}"
                print(f"{'':>5} {ratios}{verdict}")
            for way in (ways["direct"], ways["recompute"]):
                way.loop.stop()
            ways["http"].close()
    return int(missed)


if __name__ == "__main__":
    raise SystemExit(main())
