"""Turns merge by token prefix: the known cases, and the whole class by random conversations."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.orchestrator.merging import Turn, merge_turns


def merged(*turns):
    sequences = merge_turns([Turn(prompt, completion) for prompt, completion in turns])
    return [sequence.token_ids for sequence in sequences], [s.mask for s in sequences]


def test_every_turn_that_extends_its_history_is_one_sample():
    ids, masks = merged(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 3, 4, 5], [6]))
    assert ids == [[1, 2, 3, 4, 5, 6]]
    assert masks == [[False, True, False, True, False, True]]


def test_the_longest_prefix_wins():
    ids, masks = merged(
        ([1, 2], [3, 4]),
        ([1, 2, 3, 4, 5], [6]),
        ([1, 2], [3, 4, 5, 6, 7]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [9]),
    )
    assert ids == [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6, 7, 8, 9]]
    assert masks[1] == [False, False, True, True, True, True, True, False, True]


def test_dropped_thinking_forks_and_trains_nothing_under_a_foreign_prompt():
    # turn 1 sampled [10, 11, 2]; turn 2 shows it without the thinking token 10
    ids, masks = merged(([1], [10, 11, 2]), ([1, 11, 2, 5], [7]))
    assert ids == [[1, 10, 11, 2], [1, 11, 2, 5, 7]]
    assert masks == [[False, True, True, True], [False, False, False, False, True]]


def test_equal_text_is_not_equal_tokens():
    # "12" as one token and as two
    ids, _ = merged(([5], [12]), ([5, 1, 2], [9]))
    assert ids == [[5, 12], [5, 1, 2, 9]]


def test_a_shared_sampled_turn_trains_in_the_first_sequence_only():
    ids, masks = merged(([1], [2]), ([1, 2, 3], [4]), ([1, 2, 5], [6]))
    assert ids == [[1, 2, 3, 4], [1, 2, 5, 6]]
    assert masks == [[False, True, False, True], [False, False, False, True]]


def test_a_merged_response_is_not_cut_at_one_turn_s_limit():
    ids, masks = merged(([1], [2, 3, 4]), ([1, 2, 3, 4, 7, 8, 9], [5, 6, 2]))
    assert len(ids[0]) == 10 and sum(masks[0]) == 6


def test_an_appended_end_token_is_kept_as_context_and_never_trained():
    turn = Turn([1], [5, 6, 2], completion_mask=[True, True, False], logprobs=[-1.0, -2.0, 0.0])
    [sequence] = merge_turns([turn, Turn([1, 5, 6, 2, 9], [4], logprobs=[-0.5])])
    assert sequence.mask == [False, True, True, False, False, True]
    assert sequence.logprobs == [0.0, -1.0, -2.0, 0.0, 0.0, -0.5]


def test_misaligned_turns_are_refused():
    with pytest.raises(ValueError, match="2 completion tokens, 2 mask entries, 1 log"):
        merge_turns([Turn([1], [2, 3], logprobs=[-1.0])])


def test_no_turns_give_no_sequences():
    assert merge_turns([]) == []


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=3)


@st.composite
def conversations(draw):
    """Random trees of turns: each prompt is new, or continues (and maybe damages) an earlier turn."""
    turns: list[tuple[list[int], list[int]]] = []
    for _ in range(draw(st.integers(1, 7))):
        if turns and draw(st.booleans()):
            prompt, completion = turns[draw(st.integers(0, len(turns) - 1))]
            history = prompt + completion
            if draw(st.integers(0, 3)) == 0:
                history = history[: draw(st.integers(1, len(history)))]
            prompt = history + draw(TOKENS)
        else:
            prompt = draw(TOKENS)
        turns.append((prompt, draw(TOKENS)))
    return turns


@given(conversations())
@settings(max_examples=300, deadline=None)
def test_every_sampled_token_trains_once_under_the_prompt_it_was_sampled_from(turns):
    sequences = merge_turns(
        [Turn(p, c, logprobs=[-float(n + 1)] * len(c)) for n, (p, c) in enumerate(turns)]
    )
    assert sorted(number for s in sequences for number in s.turns) == list(range(len(turns)))
    for sequence in sequences:
        assert len(sequence.token_ids) == len(sequence.mask) == len(sequence.logprobs)
        expected = [0.0] * len(sequence.token_ids)
        for number in sequence.turns:
            prompt, completion = turns[number]
            end = len(prompt) + len(completion)
            assert sequence.token_ids[:end] == prompt + completion
            expected[len(prompt) : end] = [-float(number + 1)] * len(completion)
        assert sequence.logprobs == expected
        assert sequence.mask == [value != 0.0 for value in expected]
        last_prompt, last_completion = turns[sequence.turns[-1]]
        assert sequence.token_ids == last_prompt + last_completion
