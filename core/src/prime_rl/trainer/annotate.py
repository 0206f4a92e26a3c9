"""Writes what the trainer knows about every token onto the stored episodes."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from prime_rl.traces.annotations import AnnotationWriter
from prime_rl.trainer.step import RowTrace
from prime_rl.trainer.streams import Array


def annotate(writer: AnnotationWriter, step: int, traces: list[RowTrace]) -> None:
    """Streams `trainer_logprobs`, `entropies`, `mismatch_kl`, `is_masked` and every metric of the
    loss, one value per token of each document that came with a trace id, None where there is none.
    """
    for trace in traces:
        streams = trace.row.streams
        if not any(streams.trace_ids):
            continue
        columns = _columns(trace)
        start = 0
        for trace_id, branch_index, length in zip(
            streams.trace_ids, streams.branch_indices, streams.lengths, strict=True
        ):
            part = slice(start, start + length)
            start += length
            if trace_id:
                values = {name: column[part].tolist() for name, column in columns.items()}
                writer.write(trace_id, branch_index, step, values)
    writer.flush()


def _columns(trace: RowTrace) -> dict[str, Array]:
    """Stream name -> object [S] with numbers where the token was scored, None elsewhere."""
    count, scored = len(trace.row.streams.input_ids), trace.row.streams.scored
    columns = {"trainer_logprobs": _spread(trace.logprobs, scored, count)}
    if trace.entropies is not None:
        columns["entropies"] = _spread(trace.entropies, scored, count)
    for component in trace.components:
        index = component.members.index
        places = scored if index is None else scored[index.cpu().numpy()]
        for name, values in component.streams.items():
            columns[name] = _spread(values, places, count)
    return columns


def _spread(values: Tensor, places: Array, count: int) -> Array:
    column: Any = np.full(count, None, dtype=object)
    column[places] = values.tolist()
    return column
