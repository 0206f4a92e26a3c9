"""Cuts packed documents into chunks of equal length for the delta rule.

T tokens, M chunks of C tokens, D documents. Chunks start at document starts; the last chunk of a
document is filled with places that hold no token. They are ordered by step: first the first chunk
of every document, then the second chunk of those that have one, longest documents first, so that
the documents still running at a step are the first ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_TOKENS = 64
SMALLEST_CHUNK = 16


class Chunks(NamedTuple):
    """Where the tokens of a batch stand in its chunks."""

    rows_MC: Tensor
    """int64, token of every place; T where there is none."""
    places_T: Tensor
    """int64, place of every token in the flattened chunks."""
    running: tuple[int, ...]
    """Documents that have a chunk at each step."""


def cut_chunks(lengths: tuple[int, ...], device: torch.device) -> Chunks:
    """Chunks of 64 tokens, or fewer when every document is shorter. Computed on the host."""
    longest, tokens = max(lengths, default=1), sum(lengths)
    size = min(CHUNK_TOKENS, max(SMALLEST_CHUNK, 1 << (longest - 1).bit_length()))
    lengths_D = torch.tensor(lengths, dtype=torch.int64)
    starts_D = lengths_D.cumsum(0) - lengths_D
    order_D = lengths_D.argsort(descending=True, stable=True)
    counts_D = -(-lengths_D // size)
    steps = int(counts_D.max()) if lengths else 0
    has_chunk_XD = torch.arange(steps)[:, None] < counts_D[order_D]
    step_M, place_M = has_chunk_XD.nonzero(as_tuple=True)
    document_M = order_D[place_M]
    offsets_MC = step_M[:, None] * size + torch.arange(size)
    is_token_MC = offsets_MC < lengths_D[document_M, None]
    rows_MC = torch.where(is_token_MC, starts_D[document_M, None] + offsets_MC, tokens)
    places_T = torch.empty(tokens, dtype=torch.int64)
    flat = is_token_MC.flatten().nonzero()[:, 0]
    places_T[rows_MC.flatten()[flat]] = flat
    return Chunks(
        rows_MC.to(device, non_blocking=True),
        places_T.to(device, non_blocking=True),
        tuple(has_chunk_XD.sum(1).tolist()),
    )
