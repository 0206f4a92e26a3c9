"""A look-up table whose rows may be divided between ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.layers.local import local_tensor


class RowTable(nn.Module):
    """`weight` [rows, width], read by row number.

    Much larger than an embedding of tokens: where there are ranks, each keeps a part of the rows
    and `exchange` asks the others, whatever else is sharded how.
    """

    exchange: Callable[[RowTable, Tensor], Tensor] | None = None

    def __init__(self, rows: int, width: int, trainable: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=trainable)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] of int64 row numbers [...]. Look up early and use late: the answer of other
        ranks arrives meanwhile."""
        if self.exchange is not None:
            return self.exchange(self, rows)
        return self.read(rows)

    def read(self, rows: Tensor) -> Tensor:
        """The same with the rows that are here, numbered from the first of them."""
        return F.embedding(rows, local_tensor(self.weight))
