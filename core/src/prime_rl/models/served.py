"""Rounds the weights that a trainer publishes to the grid on which FP8 engines keep them.

An engine that rounds to nearest keeps serving the number a weight started from until training has
moved the weight by half a step of the grid, which at small learning rates takes a thousand steps.
Rounded stochastically, a weight is served right on average after every step.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import nn

from prime_rl.api.layout import Leaf, WeightLayout
from prime_rl.api.transport import NamedTensor
from prime_rl.errors import ConfigError
from prime_rl.layers.float8_weights import WEIGHT_BLOCK, round_blocks_stochastically
from prime_rl.models.load import runtime_tensors
from prime_rl.models.save import iter_checkpoint

FLOAT8_BLOCK = (WEIGHT_BLOCK, WEIGHT_BLOCK)


@torch.no_grad()
def iter_served(
    module: nn.Module, layout: WeightLayout, dtype: torch.dtype, seed: int, version: int
) -> Iterator[NamedTensor]:
    """What `iter_checkpoint` yields, with trained FP8 matrices on their 8-bit grid.

    Those are the matrices that the layout lets releases keep in e4m3 blocks of 128 x 128. They are
    rounded from the trainer's own dtype, before `dtype`. What is frozen stays as it is, since the
    engine's own rounding to nearest is better for it. The draw depends on seed, version and name
    alone, not on ranks or transport. A collective, as `iter_checkpoint`.
    """
    leaves = {
        leaf.name: leaf for entry in layout.entries.values() for leaf in entry.source.leaves()
    }
    rounded = rounded_names(module, layout)
    for name, tensor in iter_checkpoint(module, layout):
        if name in rounded:
            generator = torch.Generator(tensor.device).manual_seed(_seed_of(seed, version, name))
            tensor = round_blocks_stochastically(tensor, generator)
        if leaves[name].dtype is None and tensor.is_floating_point():
            tensor = tensor.to(dtype)
        yield NamedTensor(name, tensor)


def rounded_names(module: nn.Module, layout: WeightLayout) -> set[str]:
    """Checkpoint names of the matrices that `iter_served` rounds."""
    tensors = runtime_tensors(module)
    return {
        leaf.name
        for entry in layout.entries.values()
        if tensors[entry.runtime].requires_grad
        for leaf in entry.source.leaves()
        if _is_float8(leaf)
    }


def check_served(module: nn.Module, layout: WeightLayout) -> None:
    """Raises ConfigError when there is nothing that `iter_served` would round."""
    if not rounded_names(module, layout):
        raise ConfigError(
            "weight_rounding: found 'stochastic_fp8', but no trained weight of this model is one "
            "that releases keep in FP8 blocks of 128 x 128; expected 'nearest'"
        )


def _is_float8(leaf: Leaf) -> bool:
    return leaf.scale is not None and leaf.scale.block == FLOAT8_BLOCK


def _seed_of(seed: int, version: int, name: str) -> int:
    """63 bits: what a generator takes as a non-negative seed."""
    digest = hashlib.sha256(f"{seed} {version} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
