"""The packed batch: a flat run of tokens of several documents, no batch dimension."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class PackedBatch:
    """One row of T tokens holding K documents. Nothing may cross a document border."""

    input_ids: Tensor
    """int64 [T]"""
    positions: Tensor
    """int64 [T], restarting at 0 in every document."""
    cu_seqlens: Tensor
    """int32 [K+1], first 0, last T."""
    lengths: tuple[int, ...]
    """The K document lengths on the host, so that nobody synchronises a device to read them."""
    routed_experts: Tensor | None = None
    """int64 [T, layers, top_k] experts to replay, by global layer number; -1 routes normally."""

    @property
    def max_length(self) -> int:
        """Longest document, in tokens."""
        return max(self.lengths, default=0)

    def document_starts(self) -> Tensor:
        """int64 [T], the row of the first token of each token's document."""
        import torch

        tokens = self.positions.shape[0]
        return torch.arange(tokens, device=self.positions.device) - self.positions

    @classmethod
    def from_documents(cls, documents: list[list[int]], device: str = "cpu") -> PackedBatch:
        """Pack token lists in order. Raises ValueError on an empty list or an empty document."""
        import torch

        lengths = tuple(len(document) for document in documents)
        if not lengths or 0 in lengths:
            raise ValueError(f"documents must be non-empty, found lengths {lengths}")
        flat = [token for document in documents for token in document]
        positions = [position for length in lengths for position in range(length)]
        borders = [0]
        for length in lengths:
            borders.append(borders[-1] + length)
        return cls(
            input_ids=torch.tensor(flat, dtype=torch.int64, device=device),
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            cu_seqlens=torch.tensor(borders, dtype=torch.int32, device=device),
            lengths=lengths,
        )
