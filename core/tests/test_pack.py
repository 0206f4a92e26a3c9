"""Packing: every token once, streams aligned, equal rows per rank, fillers train nothing."""

import itertools
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.bins import first_fit_decreasing, split_to_multiple
from prime_rl.orchestrator.columns import SampleColumns
from prime_rl.orchestrator.pack import micro_batch, pack
from prime_rl.orchestrator.partition import partition
from prime_rl.wire import RoutedExperts, SamplingMask, TrainingSample


def sample(length, number=0, env="words", routes=False, kept=False, **streams):
    base = 1000 * number
    mask = [False] + [True] * (length - 1)
    made = TrainingSample(
        token_ids=[base + i for i in range(length)],
        mask=mask,
        logprobs=[-0.001 * (base + i) if m else 0.0 for i, m in enumerate(mask)],
        temperatures=[0.5] * length,
        env_name=env,
        advantages=[float(number)] * length,
        trace_id=f"t{number}",
        branch_index=number,
    )
    for name, values in streams.items():
        setattr(made, name, values)
    if routes:
        rows = np.full((length, 2, 1), number % 200, np.uint8)
        made.routed_experts = RoutedExperts(rows.tobytes(), (length, 2, 1), "uint8")
    if kept:
        counts = np.array([int(m) for m in mask], np.int32)
        ids = np.array([t for t, m in zip(made.token_ids, mask, strict=True) if m], np.int32)
        made.sampling_mask = SamplingMask(ids.tobytes(), counts.tobytes())
    return made


def packed(samples, seq_len=16, ranks=1):
    return pack([SampleColumns.of(each) for each in samples], seq_len, ranks, tokens_cost)


def tokens_cost(lengths):
    return float(sum(lengths))


def ints(data):
    return np.frombuffer(data, np.int32).tolist()


def floats(data):
    return np.frombuffer(data, np.float32)


def documents(row):
    """(token ids, mask, logprobs) of every document of a row."""
    borders = list(itertools.accumulate(row.lengths, initial=0))
    return [
        (ints(row.input_ids)[a:b], list(row.loss_mask[a:b]), floats(row.inference_logprobs)[a:b])
        for a, b in itertools.pairwise(borders)
    ]


def assert_aligned(row):
    tokens = sum(row.lengths)
    assert len(row.input_ids) == 4 * tokens and len(row.loss_mask) == tokens
    for name in ("inference_logprobs", "temperatures", "advantages", "rl_weights", "ce_weights",
                 "ref_kl_weights", "ref_logprobs"):  # fmt: skip
        data = getattr(row, name)
        assert data is None or len(data) == 4 * tokens, name
    documents_count = len(row.lengths)
    for per_document in (row.document_envs, row.trace_ids, row.branch_indices):
        assert len(per_document) == documents_count
    if row.routed_experts is not None:
        assert row.routed_experts.shape[0] == tokens
        assert len(row.routed_experts.data) == np.prod(row.routed_experts.shape)
    if row.sampling_mask is not None:
        counts = ints(row.sampling_mask.counts)
        assert len(counts) == tokens and len(ints(row.sampling_mask.ids)) == sum(counts)


def test_a_row_is_its_samples_one_after_the_other():
    [[row]] = packed([sample(3, 1), sample(5, 2, env="sums")])
    assert row.lengths == [5, 3]
    assert ints(row.input_ids) == [2000, 2001, 2002, 2003, 2004, 1000, 1001, 1002]
    assert list(row.loss_mask) == [0, 1, 1, 1, 1, 0, 1, 1]
    assert floats(row.advantages).tolist() == [2.0] * 5 + [1.0] * 3
    assert floats(row.temperatures).tolist() == [0.5] * 8
    assert row.env_names == ["sums", "words"] and row.document_envs == [0, 1]
    assert row.trace_ids == ["t2", "t1"] and row.branch_indices == [2, 1]
    assert row.padding_tokens == 0


def test_the_neutral_first_entry_of_every_sample_survives():
    [[row]] = packed([sample(3, number) for number in (1, 2, 3)])
    assert sum(row.lengths) == len(row.loss_mask) == 9
    for _, mask, logprobs in documents(row):
        assert mask[0] == 0 and logprobs[0] == 0.0


@pytest.mark.parametrize("lengths", [[8], [8, 8]])
def test_samples_exactly_as_long_as_a_row_fill_one_each(lengths):
    grid = packed([sample(n, i) for i, n in enumerate(lengths)], seq_len=8)
    assert [row.lengths for row in grid[0]] == [[8]] * len(lengths)


def test_a_longer_sample_is_cut_with_all_its_streams():
    [[row]] = packed([sample(9, 1, routes=True, kept=True)], seq_len=8)
    assert_aligned(row)
    assert row.lengths == [8] and row.routed_experts.shape == (8, 2, 1)
    assert ints(row.sampling_mask.ids) == [1000 + i for i in range(1, 8)]


def test_fillers_have_no_trainable_token_and_nobody_s_name():
    grid = packed([sample(8, n) for n in range(3)], seq_len=8, ranks=2)
    assert [len(part) for part in grid] == [2, 2]
    rows = [row for part in grid for row in part]
    assert sum(sum(row.loss_mask) for row in rows) == 3 * 7
    [filler] = [row for row in rows if not any(row.loss_mask)]
    assert filler.trace_ids == [""] and filler.branch_indices == [-1]
    assert not floats(filler.advantages).any() and not floats(filler.inference_logprobs).any()
    assert (floats(filler.temperatures) == 0.5).all()
    assert_aligned(filler)


def test_rows_split_before_fillers_are_added():
    grid = packed([sample(4, n) for n in range(4)], seq_len=16, ranks=4)
    assert [[row.lengths for row in part] for part in grid] == [[[4]]] * 4


def test_a_trailing_document_is_never_padding():
    for part in packed([sample(5, 1)], seq_len=8):
        for row in part:
            assert row.lengths == [5] and row.padding_tokens == 0


def test_rows_with_and_without_routes_or_masks_stay_apart():
    samples = [
        sample(3, 1, routes=True),
        sample(3, 2),
        sample(3, 3, routes=True),
        sample(3, 4, kept=True),
    ]
    [rows] = packed(samples)
    assert sorted(row.trace_ids for row in rows) == [["t1", "t3"], ["t2"], ["t4"]]
    for row in rows:
        assert_aligned(row)


def test_routes_of_different_models_in_one_row_are_refused():
    odd = sample(3, 2)
    odd.routed_experts = RoutedExperts(bytes(3), (3, 1, 1), "uint8")
    with pytest.raises(ValueError, match="differ in shape"):
        packed([sample(3, 1, routes=True), odd])


def test_a_missing_stream_is_neutral_beside_one_that_has_it():
    weighted = sample(3, 1, rl_weights=[0.0, 0.5, 0.25], ref_logprobs=[0.0, -1.0, -2.0])
    [[row]] = packed([weighted, sample(4, 2)])
    assert row.lengths == [4, 3]
    assert floats(row.rl_weights).tolist() == [0, 1, 1, 1, 0, 0.5, 0.25]
    assert floats(row.ref_logprobs).tolist() == [0, 0, 0, 0, 0, -1, -2]
    assert row.ce_weights is None


def test_a_sample_without_advantages_gets_no_rl_weight_beside_one_with():
    imitated = sample(3, 1, advantages=None, ce_weights=[0.0, 1.0, 1.0])
    [[row]] = packed([imitated, sample(4, 2)])
    assert floats(row.rl_weights).tolist() == [0, 1, 1, 1, 0, 0, 0]
    assert floats(row.ce_weights).tolist() == [0, 0, 0, 0, 0, 1, 1]


def test_an_empty_batch_is_refused():
    with pytest.raises(ValueError, match="empty batch"):
        packed([])


@pytest.mark.parametrize("name", ["mask", "logprobs", "temperatures", "advantages"])
def test_misaligned_samples_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} has 2 entries, token_ids has 3"):
        SampleColumns.of(sample(3, 1, **{name: [0.0, 0.0]}))


def test_first_fit_takes_the_first_row_with_room():
    # 6 | 5 | 4 joins 6 (10) | 3 joins 5 | 2 joins 5+3 | 1 opens nothing: 10 is full, 5+3+2 is full
    assert first_fit_decreasing([1, 2, 3, 4, 5, 6], 10) == [[5, 3], [4, 2, 1], [0]]
    assert first_fit_decreasing([], 10) == []
    with pytest.raises(ValueError, match="item of 11 does not fit a row of 10"):
        first_fit_decreasing([11], 10)


def slow_first_fit(lengths, capacity):
    rows: list[list[int]] = []
    for item in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for row in rows:
            if sum(lengths[i] for i in row) + lengths[item] <= capacity:
                row.append(item)
                break
        else:
            rows.append([item])
    return rows


@given(st.lists(st.integers(1, 20), max_size=40))
@settings(max_examples=200, deadline=None)
def test_first_fit_equals_the_slow_way(lengths):
    assert first_fit_decreasing(lengths, 20) == slow_first_fit(lengths, 20)


def test_splitting_keeps_items_and_reaches_the_multiple():
    lengths = [4, 4, 3, 3, 2]
    rows = split_to_multiple(
        [[0, 1, 2, 3, 4]], lengths, 4, lambda row: sum(lengths[i] for i in row)
    )
    assert len(rows) == 4 and sorted(i for row in rows for i in row) == [0, 1, 2, 3, 4]
    assert split_to_multiple([[0], [1], [2]], lengths, 2, lambda row: 1.0) == [[0], [1], [2]]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=24), st.integers(1, 4))
@settings(max_examples=200, deadline=None)
def test_partition_is_even_in_number_and_complete(loads, ranks):
    loads = loads + [0] * (-len(loads) % ranks)
    parts = partition(loads, ranks)
    assert {len(part) for part in parts} == {len(loads) // ranks}
    assert sorted(row for part in parts for row in part) == list(range(len(loads)))
    for part in parts:
        assert [loads[row] for row in part] == sorted((loads[row] for row in part), reverse=True)


def test_partition_balances_what_can_be_balanced():
    loads = [8.0, 7.0, 6.0, 5.0, 4.0, 3.0]
    totals = sorted(sum(loads[row] for row in part) for part in partition(loads, 2))
    assert totals == [16.0, 17.0]
    with pytest.raises(ValueError, match="3 rows cannot be divided evenly among 2 ranks"):
        partition([1.0, 2.0, 3.0], 2)


@given(
    st.lists(
        st.tuples(st.integers(2, 20), st.sampled_from(["a", "b"]), st.booleans(), st.booleans()),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 4),
    st.integers(2, 20),
)
@settings(max_examples=150, deadline=None)
def test_every_token_is_packed_once_and_every_stream_is_aligned(shapes, ranks, seq_len):
    samples = [
        sample(n, i, env=env, routes=routes, kept=kept)
        for i, (n, env, routes, kept) in enumerate(shapes)
    ]
    grid = packed(samples, seq_len, ranks)
    assert len(grid) == ranks and len({len(part) for part in grid}) == 1
    found = {}
    for row in itertools.chain(*grid):
        assert_aligned(row)
        assert sum(row.lengths) <= seq_len
        for index, (ids, mask, logprobs) in enumerate(documents(row)):
            name = row.trace_ids[index]
            if not name:
                assert not any(mask)
                continue
            assert name not in found
            found[name] = (ids, mask, logprobs, row.env_names[row.document_envs[index]])
    for i, (n, env, _, _) in enumerate(shapes):
        ids, mask, logprobs, env_found = found[f"t{i}"]
        kept = min(n, seq_len)
        assert ids == samples[i].token_ids[:kept] and env_found == env
        assert mask == [int(m) for m in samples[i].mask[:kept]]
        assert np.allclose(logprobs, samples[i].logprobs[:kept], atol=1e-6)


def test_columns_hold_the_exact_values():
    made = sample(4, 1, advantages=[0.1, 0.2, 0.3, 0.4])
    columns = SampleColumns.of(made)
    assert array("f", columns.streams["advantages"]).tolist() == [
        np.float32(value) for value in made.advantages
    ]
    assert columns.cut(4) is columns and columns.cut(2).length == 2
    row = micro_batch([columns])
    assert_aligned(row)
