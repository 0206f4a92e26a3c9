"""Which rows of an n-gram table belong to a token: primes, multipliers, and the hash itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_TABLE_STEP = 10007


@dataclass(frozen=True)
class NgramTable:
    """One table and how tokens find their rows in it."""

    layer: int
    """Global number of the layer that reads it."""
    eos_token: int
    order: int
    """Tokens of the longest n-gram."""
    width: int
    """Numbers a token receives: all heads together."""
    multipliers: tuple[int, ...]
    """One per token of an n-gram, the newest first."""
    sizes: tuple[int, ...]
    """Rows of each head: bigram heads first, then trigram heads and so on."""
    rows: int
    """All heads together, padded."""
    parts: int
    """Checkpoint tensors that hold the table."""

    @property
    def offsets(self) -> tuple[int, ...]:
        """First row of each head."""
        return tuple(sum(self.sizes[:head]) for head in range(len(self.sizes)))

    @property
    def part_sizes(self) -> tuple[int, ...]:
        """Rows of each checkpoint tensor: equal, but for a shorter last one."""
        step = -(-self.rows // self.parts)
        return tuple(min(step, self.rows - start) for start in range(0, self.rows, step))


def make_table(
    ordinal: int,
    layer: int,
    *,
    vocab_size: int,
    eos_token: int,
    order: int,
    heads: int,
    width: int,
    base: int,
    multiple: int,
    seed: int,
    parts: int,
) -> NgramTable:
    """The table with this ordinal. Every head has a prime number of rows, none twice."""
    sizes = primes_from(base, (ordinal + 1) * heads)[ordinal * heads :]
    return NgramTable(
        layer=layer,
        eos_token=eos_token,
        order=order,
        width=width,
        multipliers=make_multipliers(seed, ordinal, vocab_size, order),
        sizes=sizes,
        rows=-(-sum(sizes) // multiple) * multiple,
        parts=parts,
    )


def make_multipliers(seed: int, ordinal: int, vocab_size: int, order: int) -> tuple[int, ...]:
    """Odd numbers small enough that token * multiplier rarely exceeds 63 bits."""
    half = max(1, ((1 << 63) - 1) // vocab_size // 2)
    start = seed + _TABLE_STEP * ordinal
    return tuple(
        2 * (splitmix64(start + _GAMMA * (index + 1)) % half) + 1 for index in range(order)
    )


def splitmix64(value: int) -> int:
    """One step of the splitmix64 generator."""
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache
def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are at least `start`."""
    found: list[int] = []
    number = max(start, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return tuple(found)


def ngram_contexts(
    tokens_T: Tensor, positions_T: Tensor, order: int, eos_token: int
) -> list[Tensor]:
    """The token itself and the `order` - 1 before it, newest first: int64 [T] each.

    From the first end-of-text token or document border backwards, every older token counts as end
    of text. The token itself may be one and still sees what stands before it.
    """
    import torch

    contexts = [tokens_T]
    is_open = torch.ones_like(tokens_T, dtype=torch.bool)
    for lag in range(1, order):
        earlier_T = tokens_T.roll(lag)
        is_open = is_open & (positions_T >= lag) & (earlier_T != eos_token)
        contexts.append(torch.where(is_open, earlier_T, eos_token))
    return contexts


def ngram_rows(
    contexts: list[Tensor], multipliers: Tensor, sizes_G: Tensor, offsets_G: Tensor
) -> Tensor:
    """int64 [T, G] rows for G heads. Products wrap around at 64 bits, remainders are positive."""
    import torch

    orders = len(contexts) - 1
    hash_T = contexts[0] * multipliers[0]
    rows = []
    by_order = zip(sizes_G.chunk(orders), offsets_G.chunk(orders), strict=True)
    for lag, (sizes, offsets) in enumerate(by_order, start=1):
        hash_T = hash_T ^ (contexts[lag] * multipliers[lag])
        rows.append(torch.remainder(hash_T[:, None], sizes) + offsets)
    return torch.cat(rows, dim=1)
