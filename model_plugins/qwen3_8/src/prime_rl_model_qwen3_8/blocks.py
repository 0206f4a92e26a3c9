"""Blocks of consecutive tokens that share one index key, counted from every document's start.

T tokens, D documents, S complete blocks, B tokens of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from prime_rl.api.batch import PackedBatch


class Blocks(NamedTuple):
    """The complete blocks of a batch and what each token sees of them. int64."""

    rows_SB: Tensor
    """Tokens of every block."""
    first_T: Tensor
    """First block of the token's document."""
    last_T: Tensor
    """End of the blocks that are complete and not after the token."""
    tail_TX: Tensor
    """Tokens after these blocks up to the token itself, at most B - 1; -1 fills up."""

    def rows_of(self, chosen_TN: Tensor) -> Tensor:
        """Tokens [T, N * B + B - 1] of chosen blocks (-1: none) and of the tail."""
        is_block = (chosen_TN >= 0)[..., None]
        rows_TNB = torch.where(is_block, self.rows_SB[chosen_TN.clamp_min(0)], -1)
        return torch.cat((rows_TNB.flatten(1), self.tail_TX), dim=1)


def cut_blocks(batch: PackedBatch, size: int) -> Blocks:
    """Blocks of `size` tokens; sizes come from the host, so that a device is not waited for."""
    device = batch.positions.device
    lengths_D = torch.tensor(batch.lengths, dtype=torch.int64)
    counts_D = lengths_D // size
    starts_D = lengths_D.cumsum(0) - lengths_D
    offsets_D = counts_D.cumsum(0) - counts_D
    document_S = torch.repeat_interleave(torch.arange(len(batch.lengths)), counts_D)
    within_S = torch.arange(len(document_S)) - offsets_D[document_S]
    first_S = starts_D[document_S] + within_S * size
    first_T = torch.repeat_interleave(offsets_D, lengths_D).to(device, non_blocking=True)
    complete_T = (batch.positions + 1) // size
    tail_TX = (batch.document_starts() + complete_T * size)[:, None]
    tail_TX = tail_TX + torch.arange(size - 1, device=device)
    is_seen = tail_TX <= torch.arange(len(first_T), device=device)[:, None]
    return Blocks(
        rows_SB=(first_S[:, None] + torch.arange(size)).to(device, non_blocking=True),
        first_T=first_T,
        last_T=first_T + complete_T,
        tail_TX=torch.where(is_seen, tail_TX, -1),
    )
