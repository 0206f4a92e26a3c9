"""Step after step, the rows of this rank: received or packed, then converted in the background."""

from __future__ import annotations

import logging
import time
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch

from prime_rl.batches.base import BatchClient, BatchClosed, BatchTimeout
from prime_rl.errors import RunError
from prime_rl.trainer.batch import Row, build_row
from prime_rl.trainer.prefetch import Prefetch
from prime_rl.trainer.sft_data import SampleOrder, pack_in_order, sft_streams
from prime_rl.trainer.step import StepBatch
from prime_rl.trainer.streams import Streams, Totals

log = logging.getLogger(__name__)

REMIND_S = 30.0
"""Seconds between log lines while a batch does not come."""


@dataclass(frozen=True)
class HostBatch:
    """The rows of a step before conversion."""

    step: int
    rows: list[Streams]
    data_state: dict[str, Any] | None = None
    """Position of the data order after this batch."""


@dataclass(frozen=True)
class _Head:
    """Announces the rows that follow."""

    step: int
    totals: Totals
    count: int
    data_state: dict[str, Any] | None


class Feed:
    """Hands out step batches whose rows are converted while the one before is computed."""

    def __init__(
        self,
        source: Generator[HostBatch, None, None],
        device: torch.device,
        depth: int,
        replay_routing: bool = False,
    ) -> None:
        self._device = device
        self._replay_routing = replay_routing
        self._items = Prefetch(self._convert(source), depth)
        self.data_state: dict[str, Any] | None = None
        """Position of the data order after the batch that was handed out last."""

    def _convert(
        self, source: Generator[HostBatch, None, None]
    ) -> Generator[_Head | Row, None, None]:
        with closing(source):
            for batch in source:
                totals = sum((streams.totals for streams in batch.rows), Totals())
                yield _Head(batch.step, totals, len(batch.rows), batch.data_state)
                for streams in batch.rows:
                    yield build_row(streams, self._device, self._replay_routing)

    def next_batch(self) -> StepBatch:
        """The batch of the next step; use up its rows before asking again.

        Raises RunError when the orchestrator stopped or sent something unusable.
        """
        head = next(self._items)
        assert isinstance(head, _Head), "the rows of the previous batch were not used up"
        self.data_state = head.data_state
        return StepBatch(head.step, head.totals, head.count, self._rows(head.count))

    def _rows(self, count: int) -> Iterator[Row]:
        for _ in range(count):
            row = next(self._items)
            assert isinstance(row, Row)
            yield row

    def close(self) -> None:
        """Stop converting."""
        self._items.close()


def pulled_batches(
    client: BatchClient, first_step: int, last_step: int, timeout_s: float
) -> Generator[HostBatch, None, None]:
    """The batches of an RL stage, pulled from the orchestrator one step at a time.

    A batch is for nobody but its step; the step counts only once it was trained on, so a failed
    pull changes nothing.
    """
    try:
        for step in range(first_step, last_step + 1):
            received = _receive(client, step, timeout_s)
            if received.header.step != step:
                raise RunError(
                    f"asked the orchestrator for the batch of step {step}, "
                    f"got that of step {received.header.step}"
                )
            if not received.micro_batches:
                raise RunError(f"the batch of step {step} has no rows")
            rows = [Streams.from_micro_batch(row) for row in received.micro_batches]
            yield HostBatch(step, rows)
    finally:
        client.close()


def _receive(client: BatchClient, step: int, timeout_s: float) -> Any:
    started = time.monotonic()
    while True:
        left_s = timeout_s - (time.monotonic() - started)
        try:
            return client.receive(step, min(REMIND_S, max(0.0, left_s)))
        except BatchTimeout as error:
            waited_s = time.monotonic() - started
            if waited_s >= timeout_s:
                raise RunError(
                    f"no batch for step {step} after {waited_s:.0f} s: is the orchestrator alive? "
                    f"({error})"
                ) from error
            log.warning("step %d: no batch yet after %.0f s", step, waited_s)
        except BatchClosed as error:
            raise RunError(
                f"the orchestrator stopped before the batch of step {step}: {error}"
            ) from error


def packed_batches(
    order: SampleOrder,
    first_step: int,
    last_step: int,
    batch_size: int,
    seq_len: int,
    rank: int,
    ranks: int,
) -> Generator[HostBatch, None, None]:
    """The batches of a fine-tuning stage: every rank walks the same order and keeps its rows."""
    for step in range(first_step, last_step + 1):
        samples = order.take(batch_size)
        cut = pack_in_order([len(sample.token_ids) for sample in samples], seq_len, ranks)
        mine = [sft_streams([samples[index] for index in row]) for row in cut[rank::ranks]]
        yield HostBatch(step, mine, order.state())
