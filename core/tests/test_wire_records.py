"""Records survive the wire bit for bit, misaligned streams are named, junk is refused."""

import pickle

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.wire import (
    BatchHeader,
    MicroBatch,
    RankBatch,
    RoutedExperts,
    SamplingMask,
    TrainingSample,
    decode_micro_batches,
    encode_micro_batches,
)

FLOAT_STREAMS = (
    "logprobs",
    "temperatures",
    "advantages",
    "rl_weights",
    "ce_weights",
    "ref_kl_weights",
    "ref_logprobs",
)


def sample(length):
    return TrainingSample(
        token_ids=list(range(length)),
        mask=[True] * length,
        logprobs=[-1.0] * length,
        temperatures=[1.0] * length,
        env_name="words",
    )


@pytest.mark.parametrize("name", [*FLOAT_STREAMS, "mask"])
@pytest.mark.parametrize("wrong", [0, 2, 4])
def test_a_misaligned_stream_is_named(name, wrong):
    made = sample(3)
    setattr(made, name, [0.0] * wrong)
    with pytest.raises(ValueError, match=f"^{name} has {wrong} entries, token_ids has 3$"):
        made.check_aligned()


def test_misaligned_routes_and_sampling_masks_are_named():
    made = sample(3)
    made.routed_experts = RoutedExperts(bytes(4), (2, 2, 1), "uint8")
    with pytest.raises(ValueError, match="routed_experts has 2 rows, token_ids has 3"):
        made.check_aligned()
    made = sample(3)
    made.sampling_mask = SamplingMask(b"", bytes(16))
    with pytest.raises(ValueError, match="sampling_mask has 4 rows, token_ids has 3"):
        made.check_aligned()


def test_streams_lists_what_is_there():
    made = sample(2)
    assert sorted(made.streams()) == ["logprobs", "mask", "temperatures", "token_ids"]
    made.ce_weights = [0.0, 1.0]
    assert "ce_weights" in made.streams()
    made.check_aligned()


@st.composite
def micro_batches(draw):
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    tokens = sum(lengths)
    blob = st.binary(min_size=4 * tokens, max_size=4 * tokens)
    optional = {
        name: draw(st.none() | blob)
        for name in ("advantages", "rl_weights", "ce_weights", "ref_kl_weights", "ref_logprobs")
    }
    routes = draw(st.none() | st.binary(min_size=2 * tokens, max_size=2 * tokens))
    return MicroBatch(
        input_ids=draw(blob),
        loss_mask=draw(st.binary(min_size=tokens, max_size=tokens)),
        inference_logprobs=draw(blob),
        temperatures=draw(blob),
        lengths=lengths,
        env_names=["a", "b"],
        document_envs=[draw(st.integers(0, 1)) for _ in lengths],
        trace_ids=[draw(st.text(max_size=5)) for _ in lengths],
        branch_indices=[draw(st.integers(-1, 3)) for _ in lengths],
        routed_experts=None if routes is None else RoutedExperts(routes, (tokens, 2, 1), "uint8"),
        sampling_mask=SamplingMask(b"\x01\0\0\0", bytes(4 * tokens))
        if draw(st.booleans())
        else None,
        **optional,
    )


@given(st.lists(micro_batches(), max_size=3), st.integers(1, 9), st.booleans())
@settings(max_examples=100, deadline=None)
def test_a_batch_survives_the_wire_bit_for_bit(rows, step, final):
    batch = RankBatch(BatchHeader(step=step, policy_version=step - 1, final=final), rows)
    assert decode_micro_batches(encode_micro_batches(batch)) == batch


@given(st.binary(max_size=200))
@settings(max_examples=200, deadline=None)
def test_junk_is_refused(data):
    with pytest.raises((msgspec.DecodeError, msgspec.ValidationError)):
        decode_micro_batches(data)


def test_pickles_are_refused():
    batch = RankBatch(BatchHeader(step=1, policy_version=0), [])
    with pytest.raises(msgspec.DecodeError):
        decode_micro_batches(pickle.dumps(batch.header.step))
    whole = encode_micro_batches(batch)
    for cut in range(len(whole)):
        with pytest.raises(msgspec.DecodeError):
            decode_micro_batches(whole[:cut])
