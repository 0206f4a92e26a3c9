"""Lays FSDP2 over a module: one unit per block, the rest in the root."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from prime_rl.parallel.world import World, start_lonely_group


def data_mesh(world: World, dp_replicate: int) -> DeviceMesh:
    """[ranks], or [replicas, shards] when the sharded model is replicated (HSDP)."""
    if world.size == 1:
        start_lonely_group(world.device)
    shards = world.size // dp_replicate
    if dp_replicate == 1:
        return init_device_mesh(world.device.type, (shards,), mesh_dim_names=("shard",))
    return init_device_mesh(
        world.device.type, (dp_replicate, shards), mesh_dim_names=("replicate", "shard")
    )


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    mesh: DeviceMesh,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    keep_float32: Iterable[nn.Module] = (),
    reshard_after_forward: bool = True,
) -> None:
    """Shard `root` in place. Call it after activation checkpointing and compilation are set up.

    Parameters stay float32; forward and backward see them in `compute_dtype`, gradients are summed
    in `reduce_dtype`. Modules in `keep_float32` (routers) compute in float32. Gradients are
    *averaged* over ranks: multiply each rank's loss by their number.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    exact = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    if compute_dtype != torch.float32:
        for module in keep_float32:
            fully_shard(
                module, mesh=mesh, mp_policy=exact, reshard_after_forward=reshard_after_forward
            )
    for block in blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    fully_shard(root, mesh=mesh, mp_policy=policy)
