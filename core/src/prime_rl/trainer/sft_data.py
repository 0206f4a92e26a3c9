"""Batches of fine-tuning samples: order, position that a checkpoint keeps, packing over ranks.

The order is one for all ranks, so that a run resumes at the same sample on any number of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prime_rl.errors import CheckpointError, ConfigError
from prime_rl.trainer.sft_render import Sample, SampleCache
from prime_rl.trainer.streams import Streams


class SampleOrder:
    """Walks over all samples again and again; `state` is where it stands."""

    def __init__(self, samples: SampleCache, seed: int, shuffle: bool) -> None:
        self._samples = samples
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._cursor = 0
        self._order = self._order_of(0)

    def _order_of(self, epoch: int) -> list[int]:
        """Indices in the order of a pass: shuffled with the run's seed plus the pass number."""
        count = len(self._samples)
        if not self._shuffle:
            return list(range(count))
        return np.random.default_rng(self._seed + epoch).permutation(count).tolist()

    def take(self, count: int) -> list[Sample]:
        """The next `count` samples that train something; the position moves only when all of them
        could be had. Raises ConfigError when no sample of a whole pass trains."""
        epoch, cursor, order = self._epoch, self._cursor, self._order
        taken: list[Sample] = []
        passed_over = 0
        while len(taken) < count:
            if cursor == len(order):
                epoch, cursor = epoch + 1, 0
                order = self._order_of(epoch)
            sample = self._samples[order[cursor]]
            cursor += 1
            passed_over = 0 if sample.trains else passed_over + 1
            if sample.trains:
                taken.append(sample)
            elif passed_over >= len(order):
                raise ConfigError(
                    "no row of data.source has a token to train within seq_len; look at the "
                    "roles of its messages, or raise seq_len"
                )
        self._epoch, self._cursor, self._order = epoch, cursor, order
        return taken

    def state(self) -> dict[str, int]:
        """Pass and position in it, and the number of rows they belong to."""
        return {"epoch": self._epoch, "cursor": self._cursor, "rows": len(self._samples)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises CheckpointError when the rows are others."""
        if state["rows"] != len(self._samples):
            raise CheckpointError(
                f"the checkpoint was written with {state['rows']} rows of data, found "
                f"{len(self._samples)}; use the same data.source, or resume.skip_dataloader"
            )
        self._epoch, self._cursor = state["epoch"], state["cursor"]
        self._order = self._order_of(self._epoch)


def pack_in_order(lengths: Sequence[int], seq_len: int, multiple: int) -> list[range]:
    """Consecutive runs of samples for a number of rows that is a multiple of `multiple`.

    No row is longer than `seq_len`. Of all cuts into as few rows as that allows, the one whose
    longest row is shortest. The last ranges may be empty.
    """
    fewest = len(_cut(lengths, seq_len))
    rows = -(-fewest // multiple) * multiple
    low, high = max(lengths), seq_len
    while low < high:
        middle = (low + high) // 2
        if len(_cut(lengths, middle)) <= rows:
            high = middle
        else:
            low = middle + 1
    cut = _cut(lengths, high)
    return cut + [range(0)] * (rows - len(cut))


def _cut(lengths: Sequence[int], capacity: int) -> list[range]:
    """Fill rows in order; a sample that does not fit starts the next one."""
    rows: list[range] = []
    start = used = 0
    for index, length in enumerate(lengths):
        if index > start and used + length > capacity:
            rows.append(range(start, index))
            start, used = index, 0
        used += length
    rows.append(range(start, len(lengths)))
    return rows


def sft_streams(samples: Sequence[Sample]) -> Streams:
    """One row; without samples, a filler of two tokens that trains nothing."""
    if not samples:
        nothing = np.zeros(2, dtype=np.int32)
        return Streams(
            input_ids=nothing,
            lengths=(2,),
            loss_mask=nothing.astype(bool),
            temperatures=np.ones(2, dtype=np.float32),
            padding_tokens=2,
        )
    token_ids = np.concatenate([sample.token_ids for sample in samples])
    mask = np.concatenate([sample.mask for sample in samples])
    return Streams(
        input_ids=token_ids,
        lengths=tuple(len(sample.token_ids) for sample in samples),
        loss_mask=np.zeros(len(token_ids), dtype=bool),
        temperatures=np.ones(len(token_ids), dtype=np.float32),
        ce_weights=mask.astype(np.float32),
    )
