"""From the wire's bytes to tensors: alignment, padding, replayed candidates and routes."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from prime_rl.errors import RunError
from prime_rl.trainer.batch import build_row
from prime_rl.trainer.streams import Streams
from prime_rl.wire import MicroBatch, RoutedExperts, SamplingMask

CPU = torch.device("cpu")


def floats(*values):
    return np.asarray(values, "<f4").tobytes()


def micro_batch(**changes):
    """Two documents (3 and 2 tokens) and 3 tokens of padding."""
    row = MicroBatch(
        input_ids=np.asarray([5, 6, 7, 8, 9, 1, 1, 1], "<i4").tobytes(),
        loss_mask=bytes([0, 1, 1, 0, 1, 0, 0, 0]),
        inference_logprobs=floats(0, -1, -2, 0, -3, 0, 0, 0),
        temperatures=floats(1, 0.5, 0.5, 1, 2, 1, 1, 1),
        lengths=[3, 2, 3],
        env_names=["a", "b"],
        document_envs=[0, 1, 0],
        trace_ids=["x", "y", ""],
        branch_indices=[0, 3, -1],
        padding_tokens=3,
        advantages=floats(0, 1, 2, 0, 3, 0, 0, 0),
    )
    return msgspec.structs.replace(row, **changes)


def test_every_stream_stays_with_its_token():
    row = build_row(Streams.from_micro_batch(micro_batch()), CPU)
    assert row.targets.tolist() == [6, 7, 9]
    assert row.sources.tolist() == [0, 1, 3]
    assert row.inference_logprobs.tolist() == [-1, -2, -3]
    assert row.advantages.tolist() == [1, 2, 3]
    assert row.temperatures.tolist() == [0.5, 0.5, 2]
    assert row.segment_ids.tolist() == [0, 0, 1]
    assert row.env_ids.tolist() == [0, 0, 1]
    assert row.rl.index is None and row.rl.weights is None and row.ce is None


def test_packed_rows_restart_in_every_document():
    packed = build_row(Streams.from_micro_batch(micro_batch()), CPU).packed
    assert packed.positions.tolist() == [0, 1, 2, 0, 1, 0, 1, 2]
    assert packed.cu_seqlens.tolist() == [0, 3, 5, 8] and packed.lengths == (3, 2, 3)
    assert packed.cu_seqlens.dtype == torch.int32 and packed.input_ids.dtype == torch.int64


def test_padding_is_no_document_and_no_tokens():
    totals = Streams.from_micro_batch(micro_batch()).totals
    assert (totals.tokens, totals.documents, totals.scored, totals.rl) == (5, 2, 3, 3)


@pytest.mark.parametrize("name", ["input_ids", "loss_mask", "temperatures", "advantages"])
def test_stream_of_another_length_is_named(name):
    row = micro_batch()
    with pytest.raises(RunError, match=f"{name} has"):
        Streams.from_micro_batch(micro_batch(**{name: getattr(row, name)[:-1]}))


@pytest.mark.parametrize("name", ["document_envs", "trace_ids", "branch_indices"])
def test_document_list_of_another_length_is_named(name):
    with pytest.raises(RunError, match=f"{name} has 2 entries for 3 documents"):
        Streams.from_micro_batch(micro_batch(**{name: getattr(micro_batch(), name)[:2]}))


def test_components_share_the_scored_tokens():
    row = micro_batch(ce_weights=floats(9, 0, 0.5, 0, 0, 0, 0, 0))
    row = build_row(Streams.from_micro_batch(row), CPU)
    assert row.targets.tolist() == [6, 7, 9]
    assert row.ce.index.tolist() == [1] and row.ce.weights.tolist() == [0.5]


def kept(ids, counts):
    return SamplingMask(np.asarray(ids, "<i4").tobytes(), np.asarray(counts, "<i4").tobytes())


def test_kept_candidates_of_scored_tokens_only():
    mask = kept([6, 2, 7, 4, 4, 9], [0, 2, 1, 2, 1, 0, 0, 0])
    row = build_row(Streams.from_micro_batch(micro_batch(sampling_mask=mask)), CPU)
    assert row.kept.ids_M.tolist() == [6, 2, 7, 9]
    assert row.kept.rows_M.tolist() == [0, 0, 1, 2]
    assert row.kept.borders == (0, 2, 3, 4)


def test_sampled_token_must_be_a_candidate():
    mask = kept([6, 2, 1], [0, 2, 1, 0, 0, 0, 0, 0])
    with pytest.raises(RunError, match="not among the kept candidates at 1 positions.* 2$"):
        build_row(Streams.from_micro_batch(micro_batch(sampling_mask=mask)), CPU)


def test_kept_candidates_must_cover_the_row():
    with pytest.raises(RunError, match="sampling_mask has 2 rows"):
        build_row(Streams.from_micro_batch(micro_batch(sampling_mask=kept([6], [0, 1]))), CPU)


@pytest.mark.parametrize(("dtype", "normal"), [("uint8", 255), ("uint16", 65535)])
def test_routes_are_replayed_when_asked_for(dtype, normal):
    stored = np.arange(16, dtype=dtype)
    stored[3] = normal
    routes = RoutedExperts(stored.tobytes(), (8, 1, 2), dtype)
    streams = Streams.from_micro_batch(micro_batch(routed_experts=routes))
    assert build_row(streams, CPU).packed.routed_experts is None
    replayed = build_row(streams, CPU, replay_routing=True).packed.routed_experts
    assert replayed.shape == (8, 1, 2) and replayed.dtype == torch.int64
    assert replayed.flatten().tolist() == [0, 1, 2, -1, *range(4, 16)]


def test_routes_must_cover_the_row():
    routes = RoutedExperts(bytes(14), (7, 1, 2), "uint8")
    streams = Streams.from_micro_batch(micro_batch(routed_experts=routes))
    with pytest.raises(RunError, match="routed_experts has 7 rows for 8 tokens"):
        build_row(streams, CPU, replay_routing=True)
