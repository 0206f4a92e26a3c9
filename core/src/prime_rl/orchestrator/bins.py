"""Samples into rows of bounded length: first fit, longest first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Item numbers of each row. Every item goes to the first row that has room for it.

    A tree over rows holds the largest free space below each node, so that finding the row costs
    log(rows) steps. Raises ValueError for an item longer than a row.
    """
    order = sorted(range(len(lengths)), key=lambda item: (-lengths[item], item))
    if order and lengths[order[0]] > capacity:
        raise ValueError(f"an item of {lengths[order[0]]} does not fit a row of {capacity}")
    leaves = 1
    while leaves < len(lengths):
        leaves *= 2
    free = [capacity] * (2 * leaves)
    rows: list[list[int]] = []
    for item in order:
        length = lengths[item]
        node = 1
        while node < leaves:
            node *= 2
            if free[node] < length:
                node += 1
        row = node - leaves
        if row == len(rows):
            rows.append([])
        rows[row].append(item)
        free[node] -= length
        node //= 2
        while node:
            larger = max(free[2 * node], free[2 * node + 1])
            if free[node] == larger:
                break
            free[node] = larger
            node //= 2
    return rows


def split_to_multiple(
    rows: list[list[int]],
    lengths: Sequence[int],
    multiple: int,
    cost: Callable[[list[int]], float],
) -> list[list[int]]:
    """Split the most expensive rows in two until their number is a multiple; the items stay.

    Rows of one item cannot be split: the result may fall short of the multiple.
    """
    missing = -len(rows) % multiple
    heap = [(-cost(row), number, row) for number, row in enumerate(rows) if len(row) > 1]
    single = [row for row in rows if len(row) == 1]
    heapq.heapify(heap)
    number = len(rows)
    while missing and heap:
        _, _, row = heapq.heappop(heap)
        for half in _halves(row, lengths):
            if len(half) > 1:
                heapq.heappush(heap, (-cost(half), number, half))
                number += 1
            else:
                single.append(half)
        missing -= 1
    return [row for _, _, row in sorted(heap, key=lambda each: each[1])] + single


def _halves(row: list[int], lengths: Sequence[int]) -> tuple[list[int], list[int]]:
    """Two non-empty parts of nearly equal length."""
    halves: tuple[list[int], list[int]] = ([], [])
    totals = [0, 0]
    for item in sorted(row, key=lambda item: (-lengths[item], item)):
        smaller = 0 if totals[0] <= totals[1] else 1
        halves[smaller].append(item)
        totals[smaller] += lengths[item]
    return halves
