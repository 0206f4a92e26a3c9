"""Trainer checkpoints: model and optimizer by torch.distributed.checkpoint, counters as JSON.

<component folder>/state/        DCP files; any number of ranks can load them
<component folder>/trainer.json  step, counters, schedule, data position
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prime_rl.configs.model import ResumeConfig
from prime_rl.control.checkpoints import ComponentCheckpoint
from prime_rl.errors import CheckpointError
from prime_rl.parallel.collectives import barrier
from prime_rl.parallel.world import World
from prime_rl.trainer.schedule import Schedule

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

log = logging.getLogger(__name__)

COMPONENT = "trainer"
FORMAT = 2
STATE = "state"
COUNTERS = "trainer.json"


@dataclass
class Progress:
    """What the trainer counts."""

    step: int = 0
    """Optimizer steps done; the version of the weights."""
    total_tokens: int = 0
    """Tokens of all batches, without padding."""
    total_samples: int = 0
    """Documents of all batches."""


@dataclass
class TrainerState:
    """Everything a checkpoint holds, over live objects."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    progress: Progress = field(default_factory=Progress)
    data_state: dict[str, Any] | None = None
    """Position of the data order; None where the orchestrator keeps it."""

    @property
    def frozen(self) -> list[str]:
        """Names of parameters that do not train."""
        return sorted(n for n, p in self.model.named_parameters() if not p.requires_grad)


def save_state(checkpoint: ComponentCheckpoint, state: TrainerState, world: World) -> None:
    """Write the checkpoint of `state.progress.step`; a collective. Whole or absent."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    step = state.progress.step
    if world.is_master:
        checkpoint.begin(step, COMPONENT)
    barrier(world)
    folder = checkpoint.unfinished(step, COMPONENT)
    tensors = {
        "model": get_model_state_dict(state.model),
        "optimizer": _optimizer_tensors(state),
    }
    with _one_process_is_fine():
        dcp.save(tensors, checkpoint_id=folder / STATE, process_group=world.control)
    if world.is_master:
        (folder / COUNTERS).write_text(json.dumps(_counters(state), indent=2))
    barrier(world)
    if world.is_master:
        checkpoint.finish(step, COMPONENT)
    barrier(world)


def _by_parameter() -> StateDictOptions:
    """Optimizer states under parameter names: how parameters form groups depends on the ranks."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


def _optimizer_tensors(state: TrainerState) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    return get_optimizer_state_dict(state.model, state.optimizer, options=_by_parameter())


@contextmanager
def _one_process_is_fine() -> Iterator[None]:
    """Without the library's warning that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


def _counters(state: TrainerState) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "step": state.progress.step,
        "total_tokens": state.progress.total_tokens,
        "total_samples": state.progress.total_samples,
        "schedule_steps": state.schedule.steps_done,
        "frozen": state.frozen,
        "data": state.data_state,
    }


def load_state(folder: Path, state: TrainerState, resume: ResumeConfig, world: World) -> None:
    """Restore what `save_state` wrote, on any number of ranks; a collective.

    Raises CheckpointError when the checkpoint does not fit the run.
    """
    counters = _read_counters(folder / COUNTERS)
    if not resume.skip_optimizer and counters["frozen"] != state.frozen:
        different = sorted(set(counters["frozen"]) ^ set(state.frozen))
        raise CheckpointError(
            f"{folder}: other parameters are frozen than in this run ({different[0]} and "
            f"{len(different) - 1} more); keep model.moe.freeze_router, or resume with "
            "resume.skip_optimizer"
        )
    _load_tensors(folder / STATE, state, resume.skip_optimizer, world)
    state.progress.step = counters["step"]
    state.progress.total_tokens = counters["total_tokens"]
    state.progress.total_samples = counters["total_samples"]
    if not resume.skip_scheduler:
        state.schedule.steps_done = counters["schedule_steps"]
    state.data_state = None if resume.skip_dataloader else counters["data"]
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    log.info("loaded the checkpoint of step %d from %s", state.progress.step, folder)


def _load_tensors(folder: Path, state: TrainerState, skip_optimizer: bool, world: World) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import (
        get_model_state_dict,
        set_model_state_dict,
        set_optimizer_state_dict,
    )

    wanted: dict[str, Any] = {"model": get_model_state_dict(state.model)}
    if not skip_optimizer:
        wanted["optimizer"] = _optimizer_tensors(state)
    try:
        with _one_process_is_fine():
            dcp.load(wanted, checkpoint_id=folder, process_group=world.control)
    except (dcp.api.CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{folder} does not fit this run's model and optimizer: {error}"
        ) from error
    set_model_state_dict(state.model, wanted["model"])
    if not skip_optimizer:
        set_optimizer_state_dict(
            state.model,
            state.optimizer,
            optim_state_dict=wanted["optimizer"],
            options=_by_parameter(),
        )


def _read_counters(path: Path) -> dict[str, Any]:
    try:
        counters: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if counters.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {counters.get('format')!r}, this version reads {FORMAT}"
        )
    return counters
