"""Per-token arrays of one sequence: routed experts and sampling masks along a path of nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from prime_rl.wire import RoutedExperts, SamplingMask

ROUTE_NORMALLY = {"uint8": 255, "uint16": 65535}
"""Value of a row that holds no routes, by dtype."""


LARGEST_FLOAT32 = float(np.finfo(np.float32).max)


def are_finite(values: Sequence[float]) -> bool:
    """No NaN, no infinity. A sum of finite numbers is finite unless it overflows, and it is several
    times as fast as looking at each."""
    return math.isfinite(sum(values)) or all(map(math.isfinite, values))


def fit_float32(values: Sequence[float]) -> bool:
    """All finite, and so as float32, which is what the trainer gets."""
    if not values:
        return True
    return are_finite(values) and max(values) <= LARGEST_FLOAT32 and min(values) >= -LARGEST_FLOAT32


def decode_array(encoded: dict[str, Any]) -> np.ndarray:
    """An array as the env server's wire carries it: dtype, shape and raw bytes."""
    return np.frombuffer(encoded["data"], np.dtype(encoded["dtype"])).reshape(encoded["shape"])


def join_routes(nodes: Sequence[dict[str, Any]], is_cut: bool, length: int) -> RoutedExperts | None:
    """Routes of the first `length` tokens of a path; None when a node lacks them.

    The engine never ran a forward over the last sampled token, so its row says "route normally";
    a sequence that is cut at `length` ends in a token that was run.
    """
    holding = [node for node in nodes if node["token_ids"]]
    if not holding or any(node.get("routed_experts") is None for node in holding):
        return None
    parts = [decode_array(node["routed_experts"]) for node in holding]
    if any(len(part) != len(node["token_ids"]) for part, node in zip(parts, holding, strict=True)):
        return None
    dtype = max((part.dtype for part in parts), key=lambda each: each.itemsize)
    routes = np.concatenate([part.astype(dtype) for part in parts])[:length]
    if not is_cut:
        routes[-1] = ROUTE_NORMALLY[dtype.name]
    rows, layers, top_k = routes.shape
    return RoutedExperts(routes.tobytes(), (rows, layers, top_k), dtype.name)  # type: ignore[arg-type]


def join_sampling_masks(
    nodes: Sequence[dict[str, Any]], mask: Sequence[bool]
) -> SamplingMask | None:
    """Kept candidates of every token with `mask`; 0 candidates (the full vocabulary) elsewhere.

    None when no node has any. `mask` may be shorter than the path: the rest is cut off. Raises
    ValueError when a node's counts fit neither its sampled tokens nor its ids.
    """
    if all(node.get("sampling_mask") is None for node in nodes):
        return None
    counts = np.zeros(sum(len(node["token_ids"]) for node in nodes), np.int32)
    ids: list[np.ndarray] = []
    start = 0
    for node in nodes:
        rows = node.get("sampling_mask")
        if rows is not None:
            sampled = start + np.flatnonzero(np.asarray(node["mask"], bool))
            found, kept = decode_array(rows["counts"]), decode_array(rows["ids"])
            if len(found) != len(sampled) or (found < 0).any() or found.sum() != len(kept):
                raise ValueError(
                    f"sampling_mask has {len(found)} counts, which add up to {found.sum()}, and "
                    f"{len(kept)} ids for {len(sampled)} sampled tokens"
                )
            counts[sampled] = found
            ids.append(kept)
        start += len(node["token_ids"])
    flat = np.concatenate(ids).astype(np.int32) if ids else np.zeros(0, np.int32)
    keep = np.zeros(len(counts), bool)
    keep[: len(mask)] = mask
    flat = flat[np.repeat(keep, counts)]
    counts[~keep] = 0
    return SamplingMask(flat.tobytes(), counts[: len(mask)].tobytes())
