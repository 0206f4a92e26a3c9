"""What engines say about themselves on /metrics: requests, caches, evictions."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

RUNNING = "vllm:num_requests_running"
WAITING = "vllm:num_requests_waiting"
CACHE_USAGE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
EVICTIONS = "vllm:num_preemptions_total"
CACHE_CONFIG = "vllm:cache_config_info"

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(\{.*\})?\s+(\S+)")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True)
class EngineLoad:
    """All engines of a run together."""

    running: float
    """Requests in batches."""
    waiting: float
    """Requests that wait for a place."""
    cache_usage: float
    """Filled share of the fullest engine's cache, 0 to 1; 0 when engines do not say."""
    evictions: float
    """Running requests put back into the queue since the engines started."""
    capacity_tokens: int | None = None
    """Tokens that all caches hold; None when engines do not say."""


def engine_load(pages: Sequence[str]) -> EngineLoad | None:
    """The load out of one /metrics page per engine; None when a page lacks running or waiting."""
    usage, totals, capacity = 0.0, dict.fromkeys((RUNNING, WAITING, EVICTIONS), 0.0), 0
    for page in pages:
        values, capacities = _read(page)
        if RUNNING not in values or WAITING not in values:
            return None
        for name in totals:
            totals[name] += sum(values[name])
        usage = max([usage, *(value for name in CACHE_USAGE for value in values[name])])
        capacity += sum(capacities)
    return EngineLoad(
        running=totals[RUNNING],
        waiting=totals[WAITING],
        cache_usage=usage,
        evictions=totals[EVICTIONS],
        capacity_tokens=capacity or None,
    )


def _read(page: str) -> tuple[defaultdict[str, list[float]], list[int]]:
    """Values by name, one per set of labels, and the tokens of each cache described."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    capacities = []
    for line in page.splitlines():
        found = _SAMPLE.match(line)
        if found is None:
            continue
        name, labels, text = found.groups()
        try:
            values[name].append(float(text))
        except ValueError:
            continue
        if name == CACHE_CONFIG:
            described = dict(_LABEL.findall(labels or ""))
            blocks, size = described.get("num_gpu_blocks", ""), described.get("block_size", "")
            if blocks.isdecimal() and size.isdecimal():
                capacities.append(int(blocks) * int(size))
    return values, capacities
