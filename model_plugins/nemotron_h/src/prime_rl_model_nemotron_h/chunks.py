"""How one packed row is cut into chunks for the scan, and where documents begin in them.

T tokens, C chunks, L tokens of a chunk.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Chunks(NamedTuple):
    """The row's chunks. Chunks follow the row, not the documents: a chunk may hold many."""

    length: int
    """L"""
    number: int
    """C; the last chunk is filled up."""
    before_CL: Tensor
    """int64, tokens of the same document before the token in its chunk."""
    visible_CLL: Tensor
    """bool, [c, i, j]: token j is not after token i and of the same document."""
    began_earlier_CL: Tensor
    """bool, the token's document began in an earlier chunk."""

    def split(self, rows: Tensor) -> Tensor:
        """[T, ...] as [C, L, ...], filled up with zeros."""
        missing = self.number * self.length - rows.shape[0]
        if missing:
            rows = F.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))
        return rows.unflatten(0, (self.number, self.length))


def make_chunks(positions_T: Tensor, length: int) -> Chunks:
    """Chunks of `length` tokens, or one of the row's length when that is shorter.

    `positions` restart at 0 in every document. Places after the row's end count as documents of
    their own.
    """
    tokens = positions_T.shape[0]
    length = max(min(length, tokens), 1)
    number = max(-(-tokens // length), 1)
    positions_CL = F.pad(positions_T, (0, number * length - tokens)).view(number, length)
    place_L = torch.arange(length, device=positions_T.device)
    start_CL = place_L - positions_CL
    """Place of the document's first token, counted from the chunk's; negative: in an earlier one."""
    same_CLL = start_CL[:, :, None] == start_CL[:, None, :]
    return Chunks(
        length=length,
        number=number,
        before_CL=torch.minimum(positions_CL, place_L),
        visible_CLL=same_CLL & (place_L[:, None] >= place_L),
        began_earlier_CL=start_CL < 0,
    )
