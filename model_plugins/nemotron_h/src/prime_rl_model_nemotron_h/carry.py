"""Carries the state from chunk to chunk, as one operator: compiled graphs hold a call of it, not its
steps, and so fit any number of chunks. C chunks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@torch.library.custom_op("prime_rl_nemotron_h::states_before", mutates_args=())
def states_before(added: Tensor, factor: Tensor) -> Tensor:
    """The state at the start of every chunk: 0, then state[c + 1] = factor[c] * state[c] + added[c].

    Chunks stand along the first dimension; `factor` may be of size 1 where `added` is not. Chunks
    are taken in blocks, all blocks at once, then the blocks one after the other: 2 * sqrt(C) steps.
    Returns [C, ...], as `added`.
    """
    count = added.shape[0]
    size = math.isqrt(count - 1) + 1
    blocks = -(-count // size)
    padding = (0, 0) * (added.dim() - 1) + (0, blocks * size - count)
    added, factor = (F.pad(part, padding).unflatten(0, (blocks, size)) for part in (added, factor))
    state, left = torch.zeros_like(added[:, 0]), torch.ones_like(factor[:, 0])
    inside, lefts = [], []
    for step in range(size):
        inside.append(state)
        lefts.append(left)
        state = torch.addcmul(added[:, step], factor[:, step], state)
        left = left * factor[:, step]
    entry = torch.zeros_like(state[0])
    entries = []
    for block in range(blocks):
        entries.append(entry)
        entry = torch.addcmul(state[block], left[block], entry)
    whole = torch.addcmul(
        torch.stack(inside, 1), torch.stack(lefts, 1), torch.stack(entries)[:, None]
    )
    return whole.flatten(0, 1)[:count].clone()


@states_before.register_fake
def _shape(added: Tensor, factor: Tensor) -> Tensor:
    return added.new_empty(added.shape)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1], output)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The same recurrence from the last chunk to the first: what a chunk adds is felt as the
    gradient of the state after it."""
    factor, state = ctx.saved_tensors
    after = states_before(upstream.flip(0), factor.flip(0)).flip(0)
    return after, (after * state).sum_to_size(factor.shape)


states_before.register_autograd(_backward, setup_context=_keep)
