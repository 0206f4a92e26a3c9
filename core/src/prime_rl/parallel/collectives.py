"""Small messages between ranks over the control group: sums, texts, barriers. JSON, never pickle."""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from prime_rl.parallel.world import World


def sum_over_ranks(world: World, values: list[float]) -> list[float]:
    """Element-wise float64 sums of equally long lists."""
    if world.size == 1:
        return values
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, group=world.control)
    return [float(value) for value in tensor.tolist()]


def gather_json(world: World, value: Any) -> list[Any]:
    """Every rank's JSON-like value, in rank order."""
    if world.size == 1:
        return [value]
    data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(world.size)]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=world.control)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(data)] = data
    gathered = [torch.empty_like(padded) for _ in range(world.size)]
    dist.all_gather(gathered, padded, group=world.control)
    return [
        json.loads(bytes(part[: int(size)].numpy()))
        for part, size in zip(gathered, sizes, strict=True)
    ]


def barrier(world: World) -> None:
    """Wait until every rank is here."""
    if world.size > 1:
        dist.barrier(group=world.control)
