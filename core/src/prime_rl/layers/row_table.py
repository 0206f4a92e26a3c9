"""A look-up table whose rows may be divided between ranks and kept in host memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    def __init__(self, rows: int, width: int, trainable: bool = True, on_cpu: bool = False) -> None:
        """`on_cpu`: the weight stays in host memory wherever the module goes; only the rows that
        are looked up travel."""
        super().__init__()
        self.on_cpu = on_cpu
        self.weight = nn.Parameter(torch.empty(rows, width), requires_grad=trainable)

    def forward(self, rows: Tensor) -> Tensor:
        """[..., width] of int64 row numbers [...], on their device, in the table's dtype. Look up
        early and use late: the answer of other ranks arrives meanwhile."""
        asked = rows.to(self.weight.device)
        found = self.read(asked) if self.exchange is None else self.exchange(self, asked)
        return found.to(rows.device, non_blocking=True)

    def read(self, rows: Tensor) -> Tensor:
        """The rows that are here, numbered from the first of them."""
        return F.embedding(rows, local_tensor(self.weight))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """`to`, `cuda`, `to_empty` and their like: a table in host memory takes only the dtype."""
        if not self.on_cpu:
            return super()._apply(fn, recurse)
        weight = self.weight
        if weight.is_meta:
            kept = torch.empty_like(weight, device="cpu")
        else:
            kept = weight.detach().to(fn(weight.detach()[:0]).dtype)
        self.weight = nn.Parameter(kept, requires_grad=weight.requires_grad)
        return self
