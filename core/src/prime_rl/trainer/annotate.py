"""Writes what the trainer knows about every token onto the stored episodes, in a thread of its own."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from prime_rl.traces.annotations import AnnotationWriter
from prime_rl.trainer.step import RowTrace
from prime_rl.trainer.streams import Array, Streams

STEPS_AHEAD = 2
"""Steps that may wait to be written; one more makes training wait."""


@dataclass(frozen=True)
class _Columns:
    """Numbers of one row on the host."""

    streams: Streams
    values: dict[str, tuple[Array, Array]]
    """Stream name -> (positions, values)"""


class Annotator:
    """Streams `trainer_logprobs`, `entropies`, `mismatch_kl`, `is_masked` and every metric of the
    loss: one value per token of each document that came with a trace id, None where there is none.
    """

    def __init__(self, writer: AnnotationWriter) -> None:
        self._writer = writer
        self._steps: queue.Queue[tuple[int, list[_Columns]] | None] = queue.Queue(STEPS_AHEAD)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="annotations", daemon=True)
        self._thread.start()

    def add(self, step: int, traces: list[RowTrace]) -> None:
        """Annotate the rows of a step. Raises what an earlier write raised."""
        self._raise()
        known = [trace for trace in traces if any(trace.row.streams.trace_ids)]
        self._steps.put((step, [_on_host(trace) for trace in known]))

    def flush(self) -> None:
        """Wait until everything added is written."""
        self._steps.join()
        self._raise()

    def close(self) -> None:
        """Write what is left and release the file."""
        self._steps.put(None)
        self._thread.join()
        self._writer.close()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (item := self._steps.get()) is not None:
            try:
                if self._error is None:
                    _write(self._writer, *item)
            except BaseException as error:  # raised in the training thread at its next call
                self._error = error
            finally:
                self._steps.task_done()
        self._steps.task_done()


def _on_host(trace: RowTrace) -> _Columns:
    """Copies of a row's numbers off the device, with the positions they belong to."""
    scored = trace.row.streams.scored
    values = {"trainer_logprobs": (scored, _array(trace.logprobs))}
    if trace.entropies is not None:
        values["entropies"] = (scored, _array(trace.entropies))
    for component in trace.components:
        index = component.members.index
        positions = scored if index is None else scored[_array(index)]
        for name, stream in component.streams.items():
            values[name] = (positions, _array(stream))
    return _Columns(trace.row.streams, values)


def _array(tensor: Tensor) -> Array:
    array: Array = tensor.cpu().numpy()
    return array


def _write(writer: AnnotationWriter, step: int, rows: list[_Columns]) -> None:
    for row in rows:
        streams = row.streams
        columns = {
            name: _spread(positions, values, len(streams.input_ids))
            for name, (positions, values) in row.values.items()
        }
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


def _spread(positions: Array, values: Array, count: int) -> Array:
    """object [S]: numbers at their positions, None elsewhere."""
    column: Any = np.full(count, None, dtype=object)
    column[positions] = values.tolist()
    spread: Array = column
    return spread
