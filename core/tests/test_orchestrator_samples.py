"""Traces -> training samples: graph branches, routes and sampling masks stay on their tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.samples import samples_of_trace
from prime_rl.wire import TrainingSample


def wire(array):
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": array.tobytes()}


def node(parent, tokens, sampled=0, unsampled_end=0, routes=None, kept=None):
    """A message node: the last `sampled` tokens before `unsampled_end` were sampled."""
    prefix = len(tokens) - sampled - unsampled_end
    return {
        "parent": parent,
        "sampled": sampled > 0,
        "token_ids": tokens,
        "mask": [False] * prefix + [True] * sampled + [False] * unsampled_end,
        "logprobs": [-0.1 * token for token in tokens[prefix : prefix + sampled]],
        "routed_experts": None if routes is None else wire(routes),
        "sampling_mask": None
        if kept is None
        else {
            "ids": wire(np.array([i for row in kept for i in row], np.int32)),
            "counts": wire(np.array([len(row) for row in kept], np.int32)),
        },
        "semantic_parents": [],
    }


def samples(nodes, seq_len=100):
    return samples_of_trace("t", nodes, "words", 0.7, seq_len)


def test_one_turn():
    [sample] = samples([node(None, [1, 2]), node(0, [3, 4, 5], sampled=2)])
    assert sample == TrainingSample(
        token_ids=[1, 2, 3, 4, 5],
        mask=[False, False, False, True, True],
        logprobs=pytest.approx([0, 0, 0, -0.4, -0.5]),
        temperatures=[0.7] * 5,
        env_name="words",
        trace_id="t",
        branch_index=0,
    )


def test_two_branches_share_a_sampled_turn_that_trains_once():
    nodes = [
        node(None, [1]),
        node(0, [2, 3], sampled=1),
        node(1, [4]),
        node(2, [5, 6], sampled=1),
        node(1, [7]),
        node(4, [8, 9], sampled=1),
    ]
    first, second = samples(nodes)
    assert first.token_ids == [1, 2, 3, 4, 5, 6] and second.token_ids == [1, 2, 3, 7, 8, 9]
    assert first.mask == [False, False, True, False, False, True]
    assert second.mask == [False, False, False, False, False, True]
    assert second.logprobs == pytest.approx([0, 0, 0, 0, 0, -0.9])
    assert (first.branch_index, second.branch_index) == (0, 1)


def test_a_trailing_observation_is_no_branch_of_its_own():
    [sample] = samples([node(None, [1]), node(0, [2, 3], sampled=1), node(1, [4])])
    assert sample.token_ids == [1, 2, 3] and sample.branch_index == 0


def test_appended_end_token_is_not_trained():
    [sample] = samples([node(None, [1]), node(0, [9, 5, 6, 2], sampled=2, unsampled_end=1)])
    assert sample.token_ids == [1, 9, 5, 6, 2]
    assert sample.mask == [False, False, True, True, False]


def test_rejected_compaction_does_not_train():
    nodes = [node(None, [1]), node(0, [2, 3], sampled=1), node(0, [4, 5], sampled=1)]
    nodes[2]["semantic_parents"] = [{"node": 1, "type": "compaction_attempt"}]
    assert [sample.token_ids for sample in samples(nodes)] == [[1, 2, 3]]
    nodes.append(node(None, [6, 7], sampled=1))
    nodes[3]["semantic_parents"] = [{"node": 2, "type": "compaction"}]
    assert [sample.token_ids for sample in samples(nodes)] == [[1, 2, 3], [1, 4, 5], [6, 7]]


def test_cut_to_the_sequence_length_keeps_streams_aligned_and_drops_empty_samples():
    nodes = [node(None, [1, 2]), node(0, [3, 4, 5], sampled=2)]
    [sample] = samples(nodes, seq_len=4)
    assert sample.token_ids == [1, 2, 3, 4] and sample.mask == [False, False, False, True]
    sample.check_aligned()
    assert samples(nodes, seq_len=3) == []
    [whole] = samples(nodes, seq_len=5)
    assert len(whole.token_ids) == 5


def test_the_first_token_never_trains():
    [sample] = samples([node(None, [3, 4], sampled=2)])
    assert sample.mask == [False, True] and sample.logprobs[0] == 0.0
    assert samples([node(None, [3], sampled=1)]) == []


def test_nothing_sampled_gives_no_sample():
    assert samples([node(None, [1, 2])]) == []
    assert samples([]) == []


def test_wrong_number_of_logprobs_is_refused():
    nodes = [node(None, [1]), node(0, [2, 3], sampled=2)]
    nodes[1]["logprobs"] = [-1.0]
    with pytest.raises(ValueError, match="2 sampled tokens with 1 log-probabilities"):
        samples(nodes)


def test_logprobs_that_are_not_finite_are_refused():
    for bad in (float("nan"), float("-inf")):
        nodes = [node(None, [1]), node(0, [2, 3], sampled=2)]
        nodes[1]["logprobs"] = [-1.0, bad]
        with pytest.raises(ValueError, match="not all finite"):
            samples(nodes)


def routes_of(sample):
    stored = sample.routed_experts
    return np.frombuffer(stored.data, stored.dtype).reshape(stored.shape)


def test_routes_stay_on_their_tokens_and_the_last_sampled_one_routes_normally():
    rows = np.arange(5 * 2 * 3, dtype=np.uint8).reshape(5, 2, 3)
    nodes = [node(None, [1, 2], routes=rows[:2]), node(0, [3, 4, 5], sampled=2, routes=rows[2:])]
    [sample] = samples(nodes)
    assert (routes_of(sample)[:4] == rows[:4]).all()
    assert (routes_of(sample)[4] == 255).all()
    [cut] = samples(nodes, seq_len=4)
    assert (routes_of(cut) == rows[:4]).all()


def test_wide_routes_keep_their_dtype_and_partial_routes_are_none():
    rows = np.full((2, 1, 1), 300, np.uint16)
    nodes = [node(None, [1], routes=rows[:1]), node(0, [2], sampled=1, routes=rows[1:])]
    [sample] = samples(nodes)
    assert sample.routed_experts.dtype == "uint16"
    assert routes_of(sample).ravel().tolist() == [300, 65535]
    nodes[0]["routed_experts"] = None
    assert samples(nodes)[0].routed_experts is None


def test_sampling_masks_stay_on_their_tokens():
    nodes = [
        node(None, [1]),
        node(0, [2, 3, 4], sampled=2, kept=[[3, 8], [4]]),
        node(1, [5, 6], sampled=1, kept=[[6, 7, 9]]),
        node(1, [7, 8], sampled=1, kept=[[8]]),
    ]
    first, second = samples(nodes)
    counts = np.frombuffer(first.sampling_mask.counts, np.int32).tolist()
    assert counts == [0, 0, 2, 1, 0, 3]
    assert np.frombuffer(first.sampling_mask.ids, np.int32).tolist() == [3, 8, 4, 6, 7, 9]
    assert np.frombuffer(second.sampling_mask.counts, np.int32).tolist() == [0, 0, 0, 0, 0, 1]
    assert np.frombuffer(second.sampling_mask.ids, np.int32).tolist() == [8]
    cut, _ = samples(nodes, seq_len=3), None
    assert np.frombuffer(cut[0].sampling_mask.counts, np.int32).tolist() == [0, 0, 2]
    assert np.frombuffer(cut[0].sampling_mask.ids, np.int32).tolist() == [3, 8]


@st.composite
def graphs(draw):
    nodes = []
    for index in range(draw(st.integers(1, 8))):
        parent = draw(st.sampled_from([None, *range(index)])) if index else None
        sampled = draw(st.integers(0, 3))
        tokens = [100 * index + n for n in range(sampled + draw(st.integers(1, 3)))]
        rows = np.full((len(tokens), 2, 1), index, np.uint8)
        kept = [[token] for token in tokens[len(tokens) - sampled :]]
        nodes.append(
            node(parent, tokens, sampled=sampled, routes=rows, kept=kept if sampled else None)
        )
    return nodes


@given(graphs(), st.integers(2, 20))
@settings(max_examples=200, deadline=None)
def test_every_stream_of_every_sample_is_aligned(nodes, seq_len):
    trained: list[int] = []
    for sample in samples(nodes, seq_len):
        sample.check_aligned()
        assert 0 < len(sample.token_ids) <= seq_len
        trained += [t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m]
        routes = routes_of(sample)
        counts = np.frombuffer(sample.sampling_mask.counts, np.int32)
        ids = np.frombuffer(sample.sampling_mask.ids, np.int32).tolist()
        assert ids == [t for t, m in zip(sample.token_ids, sample.mask, strict=True) if m]
        for position, token in enumerate(sample.token_ids):
            assert routes[position].tolist() in ([[token // 100]] * 2, [[255]] * 2)
            assert counts[position] == int(sample.mask[position])
            logprob = -0.1 * token if sample.mask[position] else 0.0
            assert sample.logprobs[position] == pytest.approx(logprob)
        assert (routes[:-1] != 255).all()
    assert len(trained) == len(set(trained))
    if seq_len >= sum(len(n["token_ids"]) for n in nodes):
        sampled = {t for n in nodes for t, m in zip(n["token_ids"], n["mask"], strict=True) if m}
        assert set(trained) == sampled
