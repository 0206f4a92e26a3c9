"""Random sums of several numbers, split for good into training and held-out ones."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from prime_rl_environment_calculator.tool import calculate

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 8
"""One sum in this many is held out."""
MOST_DRAWS_PER_SUM = 1000
"""Give up when so many draws in a row were sums that are there already or of the other split."""


@dataclass(frozen=True)
class Sum:
    """A sum that is worked out from left to right, one call of the calculator per operation."""

    text: str
    """Numbers and operations, such as `7 add 12 sub 5`."""
    calls: tuple[str, ...]
    """What to ask the calculator, in order: `7 add 12`, `19 sub 5`."""
    results: tuple[str, ...]
    """What it answers: `19`, `14`."""

    @property
    def answer(self) -> str:
        """The last result."""
        return self.results[-1]


def split_of(text: str) -> Split:
    """Which split a sum belongs to: a property of its text alone, whatever the seed or run."""
    return "held_out" if zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0 else "train"


def random_sums(
    count: int,
    *,
    seed: int,
    split: Split,
    min_operations: int,
    max_operations: int,
    max_number: int,
) -> Iterator[Sum]:
    """Yield `count` distinct sums of one split, none of whose results is negative.

    The number of operations is uniform, then every number is uniform in 1..max_number. The same
    arguments give the same sums in the same order; a larger `count` continues the list. Raises
    ValueError when the operations are out of order or there are not enough sums.
    """
    if not 1 <= min_operations <= max_operations:
        raise ValueError(
            f"operations must satisfy 1 <= min_operations <= max_operations; "
            f"got min_operations={min_operations}, max_operations={max_operations}"
        )
    source = random.Random(f"calculator/{seed}")
    seen: set[str] = set()
    for _ in range(count):
        for _ in range(MOST_DRAWS_PER_SUM):
            found = _draw(source, source.randint(min_operations, max_operations), max_number)
            if found.text not in seen and split_of(found.text) == split:
                break
        else:
            raise ValueError(
                f"{count} distinct sums were asked for and no more than {len(seen)} were found with "
                f"max_number={max_number}, max_operations={max_operations}; raise one of these "
                "or ask for fewer"
            )
        seen.add(found.text)
        yield found


def _draw(source: random.Random, operations: int, max_number: int) -> Sum:
    value = source.randint(1, max_number)
    text, calls, results = str(value), [], []
    for _ in range(operations):
        number = source.randint(1, max_number)
        operation = source.choice(("add", "sub")) if number <= value else "add"
        calls.append(f"{value} {operation} {number}")
        results.append(calculate(calls[-1]))
        text += f" {operation} {number}"
        value = int(results[-1])
    return Sum(text, tuple(calls), tuple(results))
