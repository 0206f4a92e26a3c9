"""How evenly the experts of a step were used: `max_vio/mean`.

max_vio of a layer = (most tokens of an expert) / (mean tokens of its experts) - 1; 0 is even.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from prime_rl.layers.routing import recording
from prime_rl.parallel.collectives import sum_over_ranks
from prime_rl.parallel.world import World


class RoutingLoad:
    """Counts the tokens of every expert over the rows of a step; with 0 experts it does nothing."""

    def __init__(self, experts: int) -> None:
        self._experts = experts
        self._counts: dict[int, Tensor] = {}

    @contextmanager
    def watch(self, tokens: int) -> Iterator[None]:
        """Around a forward: its layers' choices for the first `tokens` tokens are counted.

        Behind those is padding. Backward is outside, so recomputed choices do not count again.
        """
        if not self._experts:
            yield
            return
        with recording() as record:
            yield
        for layer, parts in record.layers.items():
            chosen = torch.cat(parts)[:tokens].flatten()
            counts = torch.bincount(chosen, minlength=self._experts)
            self._counts[layer] = self._counts.get(layer, 0) + counts

    def metrics(self, world: World) -> dict[str, float]:
        """Mean over layers, tokens of all ranks together; starts the next step's count."""
        if not self._counts:
            return {}
        counts_LE = torch.stack([counts for _, counts in sorted(self._counts.items())])
        self._counts = {}
        totals = sum_over_ranks(world, counts_LE.flatten().double().tolist())
        loads_LE = torch.tensor(totals).view(counts_LE.shape)
        mean_L = loads_LE.mean(dim=1).clamp(min=1e-9)
        return {"max_vio/mean": float((loads_LE.amax(dim=1) / mean_L - 1.0).mean())}
