"""Samples of a step -> one list of packed rows per data rank, equally many, nearly equal in cost.

1. cut samples to the sequence length
2. first fit, longest first, into rows of that length (samples with and without routed experts or
   sampling masks apart)
3. split the most expensive rows until every rank gets the same number; where that is not possible,
   add rows without trainable tokens
4. give rows to ranks so that the loads are nearly equal, heaviest first: ranks that work in
   lockstep then meet rows of similar cost at the same time

Rows are not padded: their length varies.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from prime_rl.orchestrator.bins import first_fit_decreasing, split_to_multiple
from prime_rl.orchestrator.columns import STREAM_TYPES, SampleColumns
from prime_rl.orchestrator.partition import partition
from prime_rl.wire import MicroBatch, RoutedExperts, SamplingMask

CostOfRow = Callable[[Sequence[int]], float]
"""Document lengths of a row -> its cost in any unit (the model's floating-point operations)."""

Row = list[SampleColumns]

FIELDS = {
    "token_ids": "input_ids",
    "mask": "loss_mask",
    "logprobs": "inference_logprobs",
    "temperatures": "temperatures",
    "advantages": "advantages",
    "rl_weights": "rl_weights",
    "ce_weights": "ce_weights",
    "ref_kl_weights": "ref_kl_weights",
    "ref_logprobs": "ref_logprobs",
}
"""Stream of a sample -> field of a micro-batch."""


def pack(
    samples: Sequence[SampleColumns], seq_len: int, ranks: int, cost: CostOfRow
) -> list[list[MicroBatch]]:
    """Micro-batches per rank. Raises ValueError for an empty batch: nobody could train on it."""
    if not samples:
        raise ValueError("an empty batch cannot be packed")
    rows = _rows([sample.cut(seq_len) for sample in samples], seq_len, ranks, cost)
    fillers = [[_without_training(rows[0][0])] for _ in range(-len(rows) % ranks)]
    rows += fillers
    loads = [cost([sample.length for sample in row]) for row in rows]
    return [[micro_batch(rows[row]) for row in part] for part in partition(loads, ranks)]


def _rows(samples: list[SampleColumns], seq_len: int, ranks: int, cost: CostOfRow) -> list[Row]:
    """Packed rows; their number is a multiple of `ranks` where splitting can make it one."""
    classes: dict[tuple[bool, bool], list[int]] = {}
    for number, sample in enumerate(samples):
        key = (sample.routed_experts is not None, sample.sampling_mask is not None)
        classes.setdefault(key, []).append(number)
    lengths = [sample.length for sample in samples]
    rows: list[list[int]] = []
    for members in classes.values():
        found = first_fit_decreasing([lengths[number] for number in members], seq_len)
        rows += [[members[item] for item in row] for row in found]

    def cost_of(row: list[int]) -> float:
        return cost([lengths[number] for number in row])

    rows = split_to_multiple(rows, lengths, ranks, cost_of)
    return [[samples[number] for number in row] for row in rows]


def _without_training(sample: SampleColumns) -> SampleColumns:
    """A row that trains nothing: the shortest that a model accepts, made of a real sample."""
    short = sample.cut(2)
    neutral = {
        name: bytes(len(data)) if name not in ("token_ids", "temperatures") else data
        for name, data in short.streams.items()
    }
    return SampleColumns(
        short.length, neutral, short.env_name, "", -1, short.routed_experts, short.sampling_mask
    )


def micro_batch(row: Row) -> MicroBatch:
    """Join the samples of one row. A stream that some sample lacks is filled with its neutral value:
    1 for rl_weights on trainable tokens, 0 otherwise."""
    names = sorted({sample.env_name for sample in row})
    tokens = sum(sample.length for sample in row)
    present = {name for sample in row for name in sample.streams}
    if not all("advantages" in sample.streams for sample in row) and "advantages" in present:
        present.add("rl_weights")
    fields = {FIELDS[name]: b"".join(_stream(sample, name) for sample in row) for name in present}
    for name, field in FIELDS.items():
        if field in fields:
            expected = tokens * array(STREAM_TYPES[name]).itemsize
            assert len(fields[field]) == expected, f"{field}: {len(fields[field])} bytes"
    return MicroBatch(
        lengths=[sample.length for sample in row],
        env_names=names,
        document_envs=[names.index(sample.env_name) for sample in row],
        trace_ids=[sample.trace_id for sample in row],
        branch_indices=[sample.branch_index for sample in row],
        routed_experts=_join_routes(row, tokens),
        sampling_mask=_join_sampling_masks(row, tokens),
        **fields,  # type: ignore[arg-type]
    )


def _stream(sample: SampleColumns, name: str) -> bytes:
    data = sample.streams.get(name)
    if data is not None:
        return data
    if name == "rl_weights" and "advantages" in sample.streams:
        return array("f", [float(flag) for flag in sample.streams["mask"]]).tobytes()
    return bytes(4 * sample.length)


def _join_routes(row: Row, tokens: int) -> RoutedExperts | None:
    parts = [sample.routed_experts for sample in row if sample.routed_experts is not None]
    if not parts:
        return None
    layouts = {(part.shape[1:], part.dtype) for part in parts}
    if len(layouts) != 1:
        raise ValueError(f"routed experts of one row differ in shape or dtype: {sorted(layouts)}")
    _, layers, top_k = parts[0].shape
    assert sum(part.shape[0] for part in parts) == tokens
    data = b"".join(part.data for part in parts)
    return RoutedExperts(data, (tokens, layers, top_k), parts[0].dtype)


def _join_sampling_masks(row: Row, tokens: int) -> SamplingMask | None:
    parts = [sample.sampling_mask for sample in row if sample.sampling_mask is not None]
    if not parts:
        return None
    counts = b"".join(part.counts for part in parts)
    assert len(counts) == 4 * tokens
    return SamplingMask(b"".join(part.ids for part in parts), counts)
