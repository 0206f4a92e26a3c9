"""Puts an episode together from what an env server streams: the `verifiers` 0.4 delta format.

A delta names its trace and carries what is new in it:

    open             once: the fields that never change
    nodes, calls, ... items to append
    set              fields that changed, whole
    links            node number -> semantic links to append
    routing_repairs  node number -> the last row of its routed experts, corrected by a later prefill
    discard          the trace was abandoned

The reply has the episode's own fields and, for every trace that counts, how long its lists must be.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from prime_rl.orchestrator.arrays import decode_array

LISTS = ("nodes", "calls", "errors", "extra_usage", "request_rewrites", "response_rewrites")


class LostDelta(RuntimeError):
    """The parts of an episode do not add up to what the server counted."""


class EpisodeAssembly:
    """One episode in the making."""

    def __init__(self) -> None:
        self.traces: dict[str, dict[str, Any]] = {}
        """By trace id, in order of arrival."""

    def apply(self, delta: dict[str, Any]) -> None:
        """Take the next delta."""
        trace_id = delta["trace"]
        if delta.get("discard"):
            self.traces.pop(trace_id, None)
            return
        trace = self.traces.get(trace_id)
        if trace is None:
            trace = self.traces[trace_id] = {**delta["open"], **{name: [] for name in LISTS}}
        for index, links in delta.get("links", {}).items():
            trace["nodes"][int(index)].setdefault("semantic_parents", []).extend(links)
        for index, row in delta.get("routing_repairs", {}).items():
            node = trace["nodes"][int(index)]
            node["routed_experts"] = _with_last_row(node["routed_experts"], row)
        for name in LISTS:
            trace[name].extend(delta.get(name, ()))
        trace.update(delta.get("set", {}))

    def finish(self, head: dict[str, Any], summaries: list[dict[str, Any]]) -> dict[str, Any]:
        """The episode's record. Raises LostDelta."""
        traces = []
        for summary in summaries:
            trace = self.traces.get(summary["id"])
            if trace is None:
                raise LostDelta(f"trace {summary['id']} never came")
            for name in ("nodes", "calls"):
                if len(trace[name]) != summary[name]:
                    raise LostDelta(
                        f"trace {summary['id']} has {len(trace[name])} {name}, the server counts "
                        f"{summary[name]}"
                    )
            traces.append(trace)
        return {**head, "traces": traces}


def _with_last_row(encoded: dict[str, Any], row: dict[str, Any]) -> dict[str, Any]:
    """The correction may need a wider dtype than the rows before it."""
    repaired = np.concatenate([decode_array(encoded)[:-1], decode_array(row)])
    return {
        "dtype": str(repaired.dtype),
        "shape": list(repaired.shape),
        "data": repaired.tobytes(),
    }
