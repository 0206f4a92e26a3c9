"""What a decode step is about to do, worked out from its requests.

R requests, T new tokens, S cache slots that are read, L cached positions that are read, K key heads,
B = S * K, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from prime_rl.api.model import DecodeRequest


class Singles(NamedTuple):
    """Requests that append one token."""

    rows: Tensor | None
    """Their rows among the T new tokens; None: all of them."""
    longest: int
    """L"""
    slots: int
    """S"""
    places_R: Tensor | None
    """Slot of each request; None when they are the first slots in order."""
    read: tuple[Tensor, ...] | None
    """Views of the first S slots' keys and values of every layer; None: the busy slots are far
    apart, and each layer copies them out."""
    mask_BGL: Tensor
    """0 or -inf to add to the scores."""


class Fresh(NamedTuple):
    """Requests that start a sequence with several tokens."""

    rows: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]


class Step(NamedTuple):
    """What all layers of one forward share."""

    tokens_T: Tensor
    slots_T: Tensor
    positions_T: Tensor
    cos_T1D: Tensor
    sin_T1D: Tensor
    last_R: Tensor | None
    """Rows of the last tokens; None: every row is one."""
    singles: Singles | None
    fresh: Fresh | None
    extensions: tuple[tuple[int, int, int, int], ...]
    """(slot, first row, tokens, first position) of longer appendages to cached sequences."""


def plain_numbers(requests: Sequence[DecodeRequest]) -> tuple[list[int], list[int]] | None:
    """(tokens, positions) when every request appends one token and they are the first slots, in
    order; else None."""
    tokens: list[int] = []
    starts: list[int] = []
    for place, request in enumerate(requests):
        if request.slot != place or len(request.tokens) != 1:
            return None
        tokens.append(request.tokens[0])
        starts.append(request.start)
    return (tokens, starts) if tokens else None


def fresh_sequences(requests: Sequence[DecodeRequest], device: torch.device) -> Fresh | None:
    rows: list[int] = []
    lengths: list[int] = []
    first = 0
    for request in requests:
        count = len(request.tokens)
        if count > 1 and request.start == 0:
            rows += range(first, first + count)
            lengths.append(count)
        first += count
    if not rows:
        return None
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return Fresh(torch.tensor(rows, device=device), borders.to(device), tuple(lengths))


def extensions(requests: Sequence[DecodeRequest]) -> tuple[tuple[int, int, int, int], ...]:
    found: list[tuple[int, int, int, int]] = []
    first = 0
    for request in requests:
        count = len(request.tokens)
        if count > 1 and request.start > 0:
            found.append((request.slot, first, count, request.start))
        first += count
    return tuple(found)
