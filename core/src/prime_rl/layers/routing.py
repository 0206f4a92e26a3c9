"""Records the experts that MoE layers choose, for engines that return them with the tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class RoutingRecord:
    """Chosen experts by global layer number, in the order the layers saw their tokens."""

    def __init__(self) -> None:
        self.layers: dict[int, list[Tensor]] = {}

    def stacked(self, num_layers: int) -> Tensor | None:
        """int64 [T, layers, top_k] on the layers' device, -1 in layers without experts; None when
        no layer chose experts. Layers that saw different numbers of tokens raise ValueError."""
        import torch

        if not self.layers:
            return None
        found = {number: torch.cat(parts) for number, parts in self.layers.items()}
        tokens = {number: indices.shape[0] for number, indices in found.items()}
        if len(set(tokens.values())) > 1:
            raise ValueError(f"MoE layers recorded different numbers of tokens: {tokens}")
        top_k = max(indices.shape[1] for indices in found.values())
        first = next(iter(found.values()))
        stacked = torch.full(
            (first.shape[0], num_layers, top_k), -1, dtype=torch.int64, device=first.device
        )
        for number, indices in found.items():
            stacked[:, number, : indices.shape[1]] = indices
        return stacked


_active = threading.local()


@contextmanager
def recording() -> Iterator[RoutingRecord]:
    """While open, `record` in this thread goes into the record that is yielded."""
    outer = getattr(_active, "record", None)
    _active.record = RoutingRecord()
    try:
        yield _active.record
    finally:
        _active.record = outer


def record(layer: int, indices_Tk: Tensor) -> None:
    """Called by every MoE layer with the experts it uses; costs nothing unless recording.

    A decode cache that splits its tokens over several calls must keep the order of its requests.
    """
    current = getattr(_active, "record", None)
    if current is not None:
        current.layers.setdefault(layer, []).append(indices_Tk.detach().long())
