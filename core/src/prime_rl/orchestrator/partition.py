"""Rows of equal number and nearly equal load for every rank: differencing, then swaps.

Karmarkar-Karp with equal cardinality: rows are sorted by load and cut into groups of one row per
rank; groups merge, the widest spread first, putting the heaviest end of one on the lightest end of
the other. Swaps between the heaviest and another rank then lower the largest load.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

SWAP_ROUNDS = 200


def partition(loads: Sequence[float], ranks: int) -> list[list[int]]:
    """Row numbers of each rank, heaviest first. The number of rows must be a multiple of `ranks`."""
    if len(loads) % ranks:
        raise ValueError(f"{len(loads)} rows cannot be divided evenly among {ranks} ranks")
    parts = _difference(loads, ranks)
    _swap(parts, loads)
    return [sorted(part, key=lambda row: (-loads[row], row)) for part in parts]


def _difference(loads: Sequence[float], ranks: int) -> list[list[int]]:
    order = sorted(range(len(loads)), key=lambda row: (-loads[row], row))
    # Heap entries: (-spread, number, [(load, rows)] from heaviest to lightest).
    heap = []
    for number, start in enumerate(range(0, len(order), ranks)):
        bins = [(loads[row], [row]) for row in order[start : start + ranks]]
        heap.append((bins[-1][0] - bins[0][0], number, bins))
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        bins = [
            (heavy[0] + light[0], heavy[1] + light[1])
            for heavy, light in zip(first, reversed(second), strict=True)
        ]
        bins.sort(key=lambda each: -each[0])
        heapq.heappush(heap, (bins[-1][0] - bins[0][0], number, bins))
        number += 1
    return [rows for _, rows in heap[0][2]] if heap else [[] for _ in range(ranks)]


def _swap(parts: list[list[int]], loads: Sequence[float]) -> None:
    totals = [sum(loads[row] for row in part) for part in parts]
    for _ in range(SWAP_ROUNDS):
        heavy = max(range(len(parts)), key=totals.__getitem__)
        light = min(range(len(parts)), key=totals.__getitem__)
        gap = totals[heavy] - totals[light]
        swap = _best_swap(parts[heavy], parts[light], loads, gap)
        if swap is None:
            return
        i, j = swap
        moved = loads[parts[heavy][i]] - loads[parts[light][j]]
        parts[heavy][i], parts[light][j] = parts[light][j], parts[heavy][i]
        totals[heavy] -= moved
        totals[light] += moved


def _best_swap(
    heavy: list[int], light: list[int], loads: Sequence[float], gap: float
) -> tuple[int, int] | None:
    """The pair whose exchange brings the two totals closest; None when none helps noticeably."""
    best: tuple[int, int] | None = None
    remaining = gap * (1 - 1e-6)
    for i, mine in enumerate(heavy):
        for j, other in enumerate(light):
            left = abs(gap - 2 * (loads[mine] - loads[other]))
            if left < remaining:
                best, remaining = (i, j), left
    return best
