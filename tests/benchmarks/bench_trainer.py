"""Trainer step against a bare hand-written PyTorch loop on the same packed rows.

Both run the same Qwen3 module in the same process, alternating, so that a busy machine hits both.
The bare loop computes full logits, IPO by hand, the same clipping and the same AdamW.

    python tests/benchmarks/bench_trainer.py [--rows 2] [--tokens 2048] [--rounds 15]
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from prime_rl.api import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import FreshModelConfig, ModelConfig
from prime_rl.configs.trainer import AdamWConfig, ConstantScheduleConfig
from prime_rl.models.fresh import make_fresh_model
from prime_rl.models.load import load_weights
from prime_rl.models.setup import build, prepare
from prime_rl.parallel.world import World
from prime_rl.plugins import scan
from prime_rl.trainer.batch import build_row
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.policy import Policy
from prime_rl.trainer.schedule import Schedule
from prime_rl.trainer.step import StepBatch, Stepper
from prime_rl.trainer.streams import Streams, Totals

LIMIT = 1.10
"""Most the trainer may take of the bare loop's time."""
ARCHITECTURE = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "tie_word_embeddings": True,
}
DEVICE = torch.device("cpu")


def random_streams(tokens: int, vocabulary: int, seed: int) -> Streams:
    """A row of documents of 20 to 60 tokens, the second half of each sampled."""
    chance = random.Random(seed)
    numbers = np.random.default_rng(seed)
    lengths: list[int] = []
    while sum(lengths) < tokens:
        lengths.append(min(chance.randint(20, 60), max(2, tokens - sum(lengths))))
    mask = np.concatenate([np.arange(n) >= n // 2 for n in lengths])
    count = len(mask)
    return Streams(
        input_ids=numbers.integers(0, vocabulary, count).astype(np.int32),
        lengths=tuple(lengths),
        loss_mask=mask,
        temperatures=np.ones(count, np.float32),
        inference_logprobs=np.full(count, -np.log(vocabulary), np.float32),
        advantages=numbers.standard_normal(count).astype(np.float32),
    )


class BareLoop:
    """What one would write by hand."""

    def __init__(self, model: torch.nn.Module, rows: list[Streams]) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=1e-4, weight_decay=0.0, fused=True
        )
        self.rows = [self._tensors(row) for row in rows]
        self.tokens = sum(int(row[1][1:].sum()) for row in self.rows)

    def _tensors(self, row: Streams) -> tuple:
        ids = torch.from_numpy(row.input_ids.astype(np.int64))
        borders = np.cumsum((0, *row.lengths))
        positions = np.arange(len(row.input_ids)) - np.repeat(borders[:-1], row.lengths)
        batch = PackedBatch(
            ids,
            torch.from_numpy(positions),
            torch.from_numpy(borders.astype(np.int32)),
            row.lengths,
        )
        return (
            batch,
            torch.from_numpy(row.loss_mask),
            torch.from_numpy(row.inference_logprobs),
            torch.from_numpy(row.advantages),
        )

    def step(self) -> float:
        """One step; the loss."""
        self.optimizer.zero_grad()
        total = 0.0
        for batch, mask, sampled, advantages in self.rows:
            hidden = self.model(batch)
            logits = hidden[:-1] @ self.model.embed_tokens.weight.T
            logprobs = torch.log_softmax(logits, -1)
            chosen = logprobs.gather(1, batch.input_ids[1:, None]).squeeze(1)
            entropy = -(logprobs.detach().exp() * logprobs.detach()).sum(-1)
            keep = mask[1:] & ((chosen.detach().exp() - sampled[1:].exp()).abs() <= 0.3)
            ratio = (chosen - sampled[1:]).exp()
            loss = -(advantages[1:] * ratio)[keep].sum() / self.tokens
            loss.backward()
            total += loss.item() + 0.0 * entropy[mask[1:]].mean().item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return total


class TrainerLoop:
    """The same step by the trainer, conversion of the rows included."""

    def __init__(self, model: torch.nn.Module, setup, rows: list[Streams], registry) -> None:
        config = registry.config_class("loss", "ipo")(type="ipo")
        optim = AdamWConfig(lr=1e-4, weight_decay=0.0)
        policy = Policy(setup.plugin, model, chunk_tokens=4096, with_entropy=True)
        self.rows = rows
        self.stepper = Stepper(
            policy,
            registry.load("loss", "ipo")(config),
            build_optimizer(optim, policy.parameters(), "rl"),
            Schedule(ConstantScheduleConfig(), optim.lr, 10**6),
            World(0, 1, DEVICE, None),
            optim.max_norm,
        )
        self.number = 0

    def step(self) -> float:
        """One step; the loss."""
        self.number += 1
        rows = [copy.copy(row) for row in self.rows]
        totals = Totals()
        for row in rows:
            totals = totals + row.totals
        converted = (build_row(row, DEVICE) for row in rows)
        result = self.stepper.step(StepBatch(self.number, totals, len(rows), converted))
        return result.metrics["loss/mean"]


def measure(rows: int, tokens: int, rounds: int) -> dict[str, float]:
    """Median seconds of both loops and their ratio; checks that they compute the same loss."""
    torch.set_num_threads(1)
    registry = scan()
    model_config = ModelConfig.model_validate({}, context=ValidationContext(registry.config_class))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        fresh = FreshModelConfig(architecture=ARCHITECTURE, tokenizer="letters")
        make_fresh_model(fresh, model_config, directory, registry)
        setup = prepare(model_config, directory, registry)
        models = [build(setup, "cpu", torch.float32) for _ in range(2)]
        for model in models:
            load_weights(model, setup.layout, directory)
    streams = [random_streams(tokens, setup.architecture.vocab_size, seed) for seed in range(rows)]
    bare = BareLoop(models[0], streams)
    trainer = TrainerLoop(models[1], setup, streams, registry)
    seconds: dict[str, list[float]] = {"bare": [], "trainer": []}
    for _ in range(rounds):
        losses = {}
        for name, loop in (("bare", bare), ("trainer", trainer)):
            started = time.perf_counter()
            losses[name] = loop.step()
            seconds[name].append(time.perf_counter() - started)
        assert abs(losses["bare"] - losses["trainer"]) < 1e-4, losses
    medians = {name: statistics.median(values[2:]) for name, values in seconds.items()}
    ratios = [t / b for t, b in zip(seconds["trainer"][2:], seconds["bare"][2:], strict=True)]
    return {
        "rows": rows,
        "tokens_per_row": tokens,
        "bare_s": round(medians["bare"], 4),
        "trainer_s": round(medians["trainer"], 4),
        "ratio": round(statistics.median(ratios), 3),
        "limit": LIMIT,
    }


def main() -> None:
    """Print one JSON line per setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(json.dumps(measure(options.rows, options.tokens, options.rounds)))


if __name__ == "__main__":
    main()
