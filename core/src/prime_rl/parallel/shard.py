"""Lays FSDP2 over a module: one unit per block, the rest in the root; experts and tables apart."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from prime_rl.layers.moe import Experts
from prime_rl.parallel.experts import divide_experts
from prime_rl.parallel.tables import divide_tables
from prime_rl.parallel.world import World, start_lonely_group


@dataclass(frozen=True)
class Meshes:
    """The same ranks, seen in three ways."""

    data: DeviceMesh
    """[ranks], or [replicas, shards] when the sharded model is replicated (HSDP)."""
    experts: DeviceMesh | None
    """[replicas, shards of one expert, ranks that divide the experts]; None: not divided."""
    world: DeviceMesh
    """[ranks]."""


def make_meshes(world: World, dp_replicate: int, expert_parallel: int) -> Meshes:
    """The meshes of a run; a collective."""
    if world.size == 1:
        start_lonely_group(world.device)
    device, shards = world.device.type, world.size // dp_replicate
    line = init_device_mesh(device, (world.size,), mesh_dim_names=("shard",))
    data, experts = line, None
    if dp_replicate > 1:
        names = ("replicate", "shard")
        data = init_device_mesh(device, (dp_replicate, shards), mesh_dim_names=names)
    if expert_parallel > 1:
        experts = init_device_mesh(
            device,
            (dp_replicate, shards // expert_parallel, expert_parallel),
            mesh_dim_names=("replicate", "shard", "expert"),
        )
    return Meshes(data, experts, line)


def shard(
    root: nn.Module,
    blocks: Iterable[nn.Module],
    meshes: Meshes,
    compute_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
    keep_float32: Iterable[nn.Module] = (),
    reshard_after_forward: bool = True,
) -> None:
    """Shard `root` in place. Call it after activation checkpointing and compilation are set up.

    Parameters stay float32; forward and backward see them in `compute_dtype`, gradients are summed
    in `reduce_dtype`. Modules in `keep_float32` (routers) compute in float32. Gradients are
    *averaged* over ranks: multiply each rank's loss by their number. Raises ValueError when experts
    cannot be divided as asked.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    exact = MixedPrecisionPolicy(
        param_dtype=torch.float32, reduce_dtype=torch.float32, output_dtype=torch.float32
    )
    tables = divide_tables(root, meshes.world)
    if meshes.experts is not None:
        for experts in divide_experts(root, meshes.experts["expert"]):
            _shard_experts(experts, meshes.experts, policy, reshard_after_forward)
    units = [(module, exact) for module in keep_float32 if compute_dtype != torch.float32]
    units += [(block, policy) for block in blocks]
    for module, own in units:
        fully_shard(
            module,
            mesh=meshes.data,
            mp_policy=own,
            reshard_after_forward=reshard_after_forward,
            ignored_params=tables,
        )
    fully_shard(root, mesh=meshes.data, mp_policy=policy, ignored_params=tables)


def _shard_experts(
    experts: Experts, mesh: DeviceMesh, policy: MixedPrecisionPolicy, reshard: bool
) -> None:
    """Shard the experts that ranks divide already over those that keep the same ones."""
    replicas, shards, _ = mesh.mesh.shape
    # Rows of each matrix rather than experts where that comes out even: experts may be too few.
    is_even = all(parameter.shape[1] % shards == 0 for parameter in experts.parameters())
    fully_shard(
        experts,
        mesh=mesh["replicate", "shard"] if replicas > 1 else mesh["shard"],
        mp_policy=policy,
        reshard_after_forward=reshard,
        shard_placement_fn=lambda _: Shard(1 if is_even else 0),
    )
