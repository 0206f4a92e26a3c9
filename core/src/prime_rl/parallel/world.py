"""Which rank this process is, on which device, and the process groups behind it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from prime_rl.errors import ConfigError


@dataclass(frozen=True)
class World:
    """The ranks of the trainer. One process alone needs no process group."""

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup | None
    """CPU group for small messages and long waits; None when there is one rank."""

    @property
    def is_master(self) -> bool:
        """Rank 0 writes metrics, markers and exports."""
        return self.rank == 0


def choose_device(wanted: Literal["auto", "cpu", "cuda"], local_rank: int) -> torch.device:
    """The device of a rank. Raises ConfigError when there is no such accelerator."""
    available = torch.cuda.device_count()
    if wanted == "cpu" or (wanted == "auto" and not available):
        return torch.device("cpu")
    if local_rank >= available:
        raise ConfigError(
            f"trainer.device: rank {local_rank} of this machine needs accelerator {local_rank}, "
            f"found {available}; set trainer.parallel.ranks to at most that, or device to cpu"
        )
    return torch.device("cuda", local_rank)


def start_world(
    wanted: Literal["auto", "cpu", "cuda"],
    collective_timeout_s: float,
    control_timeout_s: float,
    expected_ranks: int | None = None,
) -> World:
    """Join the other ranks that torchrun started; alone when there is no torchrun.

    `control_timeout_s` bounds waits for processes outside the trainer, such as engines that take
    weights. Raises ConfigError when the number of ranks is not `expected_ranks`.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if expected_ranks is not None and size != expected_ranks:
        raise ConfigError(
            f"trainer.parallel.ranks is {expected_ranks}, but {size} ranks were started; start "
            f"them with: python -m torch.distributed.run --standalone --nproc-per-node "
            f"{expected_ranks} -m prime_rl.cli.main trainer ..."
        )
    device = choose_device(wanted, local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if size == 1:
        return World(0, 1, device, None)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        timeout=timedelta(seconds=collective_timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    control = dist.new_group(
        backend="gloo", timeout=timedelta(seconds=max(collective_timeout_s, control_timeout_s))
    )
    assert isinstance(control, dist.ProcessGroup)
    return World(rank, size, device, control)


def start_lonely_group(device: torch.device) -> None:
    """A process group of one rank, for libraries that want one."""
    if not dist.is_initialized():
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.HashStore(),
            rank=0,
            world_size=1,
            device_id=device if device.type == "cuda" else None,
        )


def stop_world() -> None:
    """Leave the process groups."""
    if dist.is_initialized():
        dist.destroy_process_group()
