"""Rows sent to other ranks and back, with gradients. N rows here, M rows that arrived, P ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd


@dataclass(frozen=True)
class Route:
    """How many rows go to each rank of a group, and how many come from each."""

    group: dist.ProcessGroup
    sent: list[int]
    received: list[int]

    @classmethod
    def of(cls, sent_P: Tensor, group: dist.ProcessGroup) -> Route:
        """Tell every rank how much comes; `sent` int64 [P]. Waits for the device."""
        received_P = torch.empty_like(sent_P)
        dist.all_to_all_single(received_P, sent_P, group=group)
        sent, received = torch.stack((sent_P, received_P)).tolist()
        return cls(group, sent, received)

    def there(self, rows_N: Tensor) -> Tensor:
        """[M, ...] of [N, ...]: rows ordered by the rank they go to become rows ordered by the rank
        they came from. Asynchronous: the first use of the result waits. Gradients go back."""
        return _exchange(rows_N, self.received, self.sent, self.group)

    def back(self, rows_M: Tensor) -> Tensor:
        """[N, ...] of [M, ...]: the other way."""
        return _exchange(rows_M, self.sent, self.received, self.group)


def _exchange(
    rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
) -> Tensor:
    rows = rows.contiguous()
    if rows.is_floating_point():
        moved: Tensor = all_to_all_single_autograd(rows, received, sent, group)
        return moved
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows, received, sent, group=group)
    return result


def averaged(x: Tensor, ranks: int) -> Tensor:
    """x itself; its gradient is divided by `ranks`.

    For weights that ranks divide between them: the gradients that arrive are a sum over the ranks,
    and those of everything else are averages.
    """
    result: Tensor = _Averaged.apply(x, ranks)
    return result


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] / ctx.ranks, None
