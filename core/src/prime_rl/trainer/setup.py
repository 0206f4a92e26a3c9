"""Builds what trains: model and head on their device, weights loaded, sharded where there are ranks."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from prime_rl.api import Kernels
from prime_rl.configs.model import ModelConfig
from prime_rl.configs.run import RLConfig, SFTConfig
from prime_rl.configs.trainer import TrainerConfig
from prime_rl.errors import ConfigError
from prime_rl.models.load import load_weights
from prime_rl.models.setup import ModelSetup, build
from prime_rl.parallel.world import World
from prime_rl.trainer.policy import Policy
from prime_rl.trainer.recompute import recompute_in_backward, remember_choices

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SAME_ROUNDINGS: dict[str, Any] = {"emulate_precision_casts": True, "pattern_matcher": False}
"""Compiled blocks round to bfloat16 wherever plain ones, and engines, do. Left to itself the compiler
keeps float32 between the operations that it fuses and drops conversions to bfloat16 and back: no
worse as numbers, but near ties go the other way, and a token for which sparse attention chooses
another entry has a log-probability that is off by up to 1. Torch 2.11 drops conversions among the
patterns that it simplifies, so these are off; no difference in speed was seen."""


def compute_dtype(model: ModelConfig, device: torch.device) -> torch.dtype:
    """Dtype of forward, backward and published weights."""
    if model.compute_dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return DTYPES[model.compute_dtype]


def router_dtype(model: ModelConfig, stage_type: str, compute: torch.dtype) -> torch.dtype:
    """Dtype in which routers compute."""
    if model.moe.router_dtype == "auto":
        return torch.float32 if stage_type == "rl" else compute
    return DTYPES[model.moe.router_dtype]


def freezes_router(model: ModelConfig, stage_type: str) -> bool:
    """Whether router weights stay as they are."""
    return stage_type == "rl" if model.moe.freeze_router == "auto" else model.moe.freeze_router


def set_up_torch(trainer: TrainerConfig, device: torch.device, seed: int) -> None:
    """Threads, matrix precision and seeds of this process."""
    threads = trainer.threads or (1 if device.type == "cpu" else None)
    if threads is not None:
        torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(trainer.matmul_precision)
    torch.manual_seed(seed)


def build_policy(
    stage: RLConfig | SFTConfig, setup: ModelSetup, model_dir: Path, world: World
) -> Policy:
    """The policy with the weights of `model_dir`, parameters in float32.

    One rank that computes in float32 gets a plain module. Otherwise the module is sharded before it
    gets memory, so that no rank ever holds all of it.
    """
    compute = compute_dtype(stage.model, world.device)
    is_plain = world.size == 1 and compute == torch.float32
    model = build(setup, world.device if is_plain else "meta", torch.float32)
    routers = setup.plugin.router_parameters(model)
    frozen = setup.plugin.frozen_parameters(model)
    if freezes_router(stage.model, stage.type):
        frozen = [*frozen, *routers]
    for parameter in frozen:
        parameter.requires_grad_(False)
    policy = Policy(
        setup.plugin,
        model,
        stage.trainer.memory.logprob_chunk_tokens,
        with_entropy=stage.type == "rl",
    )
    prepare_blocks(model, setup.kernels, stage.trainer)
    if not is_plain:
        from prime_rl.parallel.shard import make_meshes, shard

        parallel = stage.trainer.parallel
        exact = setup.plugin.float32_modules(model)
        if router_dtype(stage.model, stage.type, compute) == torch.float32:
            exact = list(dict.fromkeys((*exact, *_owners(model, routers))))
        try:
            shard(
                policy,
                _blocks(model),
                make_meshes(world, parallel.dp_replicate, parallel.expert_parallel),
                compute,
                DTYPES[stage.model.reduce_dtype],
                keep_float32=exact,
                reshard_after_forward=parallel.reshard_after_forward,
            )
        except ValueError as error:
            raise ConfigError(f"trainer.parallel.expert_parallel: {error}") from error
    load_weights(model, setup.layout, model_dir, world.device)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    log.info(
        "model %s: %.3g M parameters, %s on %s, %d ranks",
        setup.config_json.get("model_type"),
        parameters / 1e6,
        str(compute).removeprefix("torch."),
        world.device,
        world.size,
    )
    return policy


def _blocks(model: nn.Module) -> list[nn.Module]:
    layers = model.layers
    assert isinstance(layers, nn.ModuleList)
    return list(layers)


def _owners(model: nn.Module, parameters: list[nn.Parameter]) -> list[nn.Module]:
    """The modules that hold the given parameters themselves."""
    wanted = {id(parameter) for parameter in parameters}
    return [
        module
        for module in model.modules()
        if any(id(parameter) in wanted for parameter in module.parameters(recurse=False))
    ]


def prepare_blocks(model: nn.Module, kernels: Kernels, trainer: TrainerConfig) -> None:
    """Compile blocks and recompute their activations, as configured."""
    if trainer.memory.compile:
        leave_kernels_alone(kernels)
    recomputes = trainer.memory.activation_checkpointing == "full"
    if recomputes:
        remember_choices(kernels)
    for block in _blocks(model):
        if trainer.memory.compile:
            # Inside what recomputes: one break in a graph that held both would leave the whole
            # block uncompiled.
            block.forward = torch.compile(block.forward, options=SAME_ROUNDINGS)
        if recomputes:
            recompute_in_backward(block)


def leave_kernels_alone(kernels: Kernels) -> None:
    """Compiled blocks call attention and experts as they are: those work by document lengths and
    token counts, which differ in every row, and a graph that held them would be rebuilt each time.
    Back ends of custom operators (capability `custom_ops`) are calls in a graph anyway and stay.
    """
    from torch.compiler import disable

    functions = [(kernels.attention, "attend"), *((each, "experts") for each in set(kernels.moe))]
    if kernels.dsa is not None:
        functions.append((kernels.dsa, "attend"))
        kernels.dsa.select = disable(kernels.dsa.select)  # type: ignore[method-assign]
    for backend, name in functions:
        if not backend.capabilities.get("custom_ops"):
            setattr(backend, name, disable(getattr(backend, name)))
