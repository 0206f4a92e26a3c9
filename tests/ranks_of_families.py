"""Started under torchrun by test_model_families.py: every model on sharded ranks against one rank.

For the architecture of every recipe that makes a fresh model: loss and gradients of the same rows,
computed by one plain module and by the module sharded over all ranks, with and without divided
experts, in float32; and a bfloat16 step of the sharded one. Prints one JSON line per comparison.
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from trainer_world import make_run, random_micro_batch

from prime_rl.configs.base import ValidationContext
from prime_rl.configs.paths import RunPaths
from prime_rl.configs.run import RunConfig, SFTConfig
from prime_rl.layers.moe import Experts
from prime_rl.models.setup import prepare
from prime_rl.parallel.world import World, start_world, stop_world
from prime_rl.plugins import scan
from prime_rl.plugins.recipes import find_recipes
from prime_rl.trainer.batch import Row, build_row
from prime_rl.trainer.policy import Policy
from prime_rl.trainer.setup import build_policy
from prime_rl.trainer.streams import Streams

CPU = torch.device("cpu")
VOCABULARY = 30
"""Token ids below this are drawn; the tokenizer `letters` has more."""


def architectures() -> Iterator[tuple[str, dict[str, Any]]]:
    """(plugin:recipe, architecture) of every shipped recipe with a fresh model."""
    seen = set()
    for record in scan().records:
        if record.kind != "model" or not record.distribution.startswith("prime-rl-"):
            continue
        for name, path in sorted(find_recipes(record).items()):
            model = tomllib.loads(path.read_text()).get("model", {})
            architecture = model.get("fresh", {}).get("architecture")
            if architecture is not None and path not in seen:
                seen.add(path)
                yield f"{record.name}:{name}", architecture


def rows_of(seed: int, count: int) -> list[Row]:
    """Rows of unequal documents."""
    lengths = [[19, 4, 1], [7, 23], [26], [3, 3, 16, 2]]
    return [
        build_row(
            Streams.from_micro_batch(random_micro_batch(seed + n, VOCABULARY, lengths[n % 4])), CPU
        )
        for n in range(count)
    ]


def step(policy: Policy, rows: list[Row], scale: float) -> float:
    """Forward and backward; the sum of the weighted log-probabilities."""
    total = torch.zeros(())
    for row in rows:
        logprobs, entropies = policy(row)
        weights = torch.linspace(-1, 1, logprobs.shape[0])
        loss = (logprobs * weights).sum() + 0.0 * entropies.sum()
        (loss * scale).backward()
        total += loss.detach()
    return float(total)


def gathered(tensor: Tensor) -> Tensor:
    whole: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole


def build(run: RunConfig, world: World, **changes: Any) -> Policy:
    stage = run.stages[0]
    assert isinstance(stage, SFTConfig)
    values = stage.model_dump()
    values["trainer"]["parallel"] |= changes.pop("parallel", {})
    values["model"] |= changes
    registry = scan()
    stage = SFTConfig.model_validate(values, context=ValidationContext(registry.config_class))
    folder = RunPaths(run.directory).fresh_model
    return build_policy(stage, prepare(stage.model, folder, registry), folder, world)


def compare(name: str, run: RunConfig, world: World) -> None:
    alone = build(run, World(0, 1, CPU, None))
    rows = rows_of(1, 2 * world.size)
    expected_loss = step(alone, rows, 1.0)
    expected = {name: p.grad for name, p in alone.named_parameters()}
    has_experts = any(isinstance(module, Experts) for module in alone.modules())
    variants = [{}] + [{"expert_parallel": world.size}] * has_experts
    for parallel in variants:
        policy = build(run, world, parallel={"ranks": world.size, **parallel})
        mine = step(policy, rows[world.rank :: world.size], float(world.size))
        loss = torch.tensor(mine)
        dist.all_reduce(loss)
        worst, where = 0.0, ""
        for key, parameter in policy.named_parameters():
            wanted = expected[key]
            assert (wanted is None) == (parameter.grad is None), key
            if wanted is None or parameter.grad is None:
                continue
            difference = (gathered(parameter.grad) - wanted).norm() / (wanted.norm() + 1e-6)
            if difference.item() >= worst:
                worst, where = difference.item(), key
        off = abs(loss.item() - expected_loss) / max(abs(expected_loss), 1e-3)
        report(world, model=name, loss=off, gradient=worst, parameter=where, **parallel)
    policy = build(
        run, world, parallel={"ranks": world.size, **variants[-1]}, compute_dtype="bfloat16"
    )
    mine = torch.tensor(step(policy, rows[world.rank :: world.size], float(world.size)))
    dist.all_reduce(mine)
    finite = all(p.grad is None or gathered(p.grad).isfinite().all() for p in policy.parameters())
    off = abs(mine.item() - expected_loss) / max(abs(expected_loss), 1.0)
    report(world, model=name, dtype="bfloat16", loss=off, finite=bool(finite))


def report(world: World, **values: Any) -> None:
    if world.is_master:
        print(json.dumps(values), flush=True)


def main() -> None:
    world = start_world("cpu", 120.0, 120.0)
    folder = Path(sys.argv[1])
    for name, architecture in architectures():
        place = folder / name.replace(":", "-")
        model = {"fresh": {"architecture": architecture, "tokenizer": "letters"}}
        if world.is_master:  # the others find the fresh model there
            make_run(place, "sft", max_steps=1, model=model)
        dist.barrier()
        compare(name, make_run(place, "sft", max_steps=1, model=model), world)
    stop_world()


if __name__ == "__main__":
    main()
