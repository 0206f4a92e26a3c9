"""A fine-tuning step of a Qwen3-0.6B-shaped model with random weights, beside transformers.

Needs an accelerator. Every setting runs in this process, one after the other, on the same tokens:
one row of `--tokens` tokens, once as a single document and once as many. The trainer keeps float32
weights and computes in bfloat16, transformers the same by autocast; both use fused AdamW.

    python tests/benchmarks/bench_sft_gpu.py [--tokens 8192] [--steps 10] [--layers 28]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prime_rl.configs.base import ValidationContext
from prime_rl.configs.run import SFTConfig
from prime_rl.models.fresh import make_fresh_model
from prime_rl.models.setup import ModelSetup, prepare
from prime_rl.parallel.world import World, start_world, stop_world
from prime_rl.plugins import Registry, scan
from prime_rl.trainer.batch import build_row
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.schedule import Schedule
from prime_rl.trainer.setup import build_policy, set_up_torch
from prime_rl.trainer.sft_data import sft_streams
from prime_rl.trainer.sft_render import Sample
from prime_rl.trainer.speed import TRAINING_FACTOR, peak_flops
from prime_rl.trainer.step import StepBatch, Stepper

ARCHITECTURE = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
WARM_UP_STEPS = 3


def make_stage(registry: Registry, layers: int, **memory: Any) -> SFTConfig:
    """The stage whose policy and optimizer are measured."""
    architecture = {**ARCHITECTURE, "num_hidden_layers": layers}
    values = {
        "model": {"fresh": {"architecture": architecture, "tokenizer": "letters"}},
        "max_steps": 10**6,
        "data": {"source": "unused.jsonl"},
        "trainer": {"optim": {"lr": 1e-5}, "memory": memory},
    }
    return SFTConfig.model_validate(values, context=ValidationContext(registry.config_class))


def documents(tokens: int, count: int) -> list[Sample]:
    """Equally long documents of random tokens, every one of them trained."""
    ids = np.random.default_rng(0).integers(0, ARCHITECTURE["vocab_size"], tokens).astype(np.int32)
    return [Sample(part, np.ones(len(part), bool)) for part in np.array_split(ids, count)]


def measure_trainer(
    registry: Registry, stage: SFTConfig, setup: ModelSetup, world: World, tokens: int, count: int,
    steps: int
) -> dict[str, float]:  # fmt: skip
    """Median seconds of a step, conversion of the row included."""
    set_up_torch(stage.trainer, world.device, 0)
    policy = build_policy(stage, setup, setup.model_dir, world)
    loss = registry.load("loss", stage.trainer.loss.type)(stage.trainer.loss)
    optimizer = build_optimizer(stage.trainer.optim, policy.parameters(), "sft")
    schedule = Schedule(stage.trainer.schedule, 1e-5, stage.max_steps)
    stepper = Stepper(policy, loss, optimizer, schedule, world, 1.0)
    samples = documents(tokens, count)

    def step(number: int) -> float:
        streams = sft_streams(samples)
        rows = iter([build_row(streams, world.device)])
        return stepper.step(StepBatch(number, streams.totals, 1, rows)).metrics["loss/mean"]

    return timed(step, steps, world.device)


def measure_transformers(directory: Path, tokens: int, steps: int) -> dict[str, float]:
    """The same step by transformers' own model and loss, one document."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
    ids = torch.from_numpy(documents(tokens, 1)[0].token_ids).long()[None].cuda()

    def step(number: int) -> float:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return timed(step, steps, torch.device("cuda"))


def timed(step: Any, steps: int, device: torch.device) -> dict[str, float]:
    """Median step seconds, first and last loss, peak memory."""
    torch.cuda.reset_peak_memory_stats(device)
    losses, seconds = [], []
    for number in range(1, WARM_UP_STEPS + steps + 1):
        torch.cuda.synchronize(device)
        started = time.perf_counter()
        losses.append(step(number))
        torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - started)
    return {
        "step_s": round(statistics.median(seconds[WARM_UP_STEPS:]), 4),
        "first_loss": round(losses[0], 4),
        "last_loss": round(losses[-1], 4),
        "peak_gib": round(torch.cuda.max_memory_allocated(device) / 2**30, 1),
    }


def main() -> None:
    """Print one JSON line per setting."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--compile", action="store_true", help="also measure compiled blocks")
    options = parser.parse_args()
    registry = scan()
    world = start_world("cuda", 600.0, 600.0)
    settings: list[tuple[str, dict[str, Any], int]] = [
        ("trainer, one document", {}, 1),
        ("trainer, 16 documents", {}, 16),
        ("trainer, recomputing activations", {"activation_checkpointing": "full"}, 1),
    ]
    if options.compile:
        settings.append(("trainer, compiled blocks", {"compile": True}, 1))
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        stage = make_stage(registry, options.layers)
        make_fresh_model(stage.model.fresh, stage.model, directory, registry)
        setup = prepare(stage.model, directory, registry)
        peak = peak_flops(world.device)
        for name, memory, count in settings:
            stage = make_stage(registry, options.layers, **memory)
            result = measure_trainer(
                registry, stage, setup, world, options.tokens, count, options.steps
            )
            lengths = [len(sample.token_ids) for sample in documents(options.tokens, count)]
            report(name, result, setup, lengths, peak)
            gc.collect()
            torch.cuda.empty_cache()
        stop_world()
        result = measure_transformers(directory, options.tokens, options.steps)
        report("transformers, one document", result, setup, [options.tokens], peak)


def report(
    name: str,
    result: dict[str, float],
    setup: ModelSetup,
    lengths: list[int],
    peak: float | None,
) -> None:
    """One line, with throughput and utilisation by the model's own FLOP count."""
    flops = TRAINING_FACTOR * setup.plugin.flops(setup.architecture, lengths)
    line: dict[str, Any] = {"setting": name, **result}
    line["tokens_per_s"] = round(sum(lengths) / result["step_s"])
    if peak is not None:
        line["mfu_percent"] = round(100 * flops / result["step_s"] / peak, 1)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
