"""A look-up table whose rows may be divided between ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RowTable(nn.Module):
    """`weight` [rows, width], read by row number.

    Much larger than an embedding of tokens: where there are ranks, each keeps a part of the rows
    and they ask each other, whatever else is sharded how.
    """

    def __init__(self, rows: int, width: int, trainable: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=trainable)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] of int64 row numbers [...]."""
        return F.embedding(rows, self.weight)
