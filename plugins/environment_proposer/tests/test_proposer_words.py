"""Words, rewards and fine-tuning rows, with values worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prime_rl_environment_proposer import sft_rows
from prime_rl_environment_proposer.scoring import proposal_reward, solution_reward
from prime_rl_environment_proposer.words import is_proposal, random_words, split_of


def words(count: int, **changes) -> list[str]:
    settings = {"seed": 0, "split": "train", "min_length": 3, "max_length": 8}
    return list(random_words(count, **{**settings, **changes}))


@pytest.mark.parametrize(
    ("solved", "reward"), [(0, 0), (1 / 4, 1 / 2), (1 / 2, 1), (3 / 4, 1 / 2), (1, 0)]
)
def test_a_word_that_half_of_the_solvers_solve_is_worth_most(solved, reward) -> None:
    assert proposal_reward(solved) == reward


@pytest.mark.parametrize(
    ("reply", "reward"), [("olleh", 1), ("hello", 0), ("olle", 0), ("ollehh", 0), ("", 0)]
)
def test_only_the_whole_word_turned_round_is_a_solution(reply, reward) -> None:
    assert solution_reward(reply, "hello") == reward


@pytest.mark.parametrize(
    ("word", "is_one"),
    [
        ("abc", True),
        ("abcdefghijkl", True),
        ("abcdefghijklm", False),  # thirteen letters
        ("ab", False),
        ("acb", False),
        ("abC", False),
        ("ab c", False),
        ("ab1", False),
        ("abé", False),
        ("", False),
    ],
)
def test_what_may_be_proposed(word, is_one) -> None:
    assert is_proposal(word, "ab", 12) == is_one


def test_words_are_distinct_repeatable_and_of_one_split() -> None:
    train, held_out = words(1500), words(500, split="held_out")
    assert train[:10] == words(10) != words(10, seed=1)
    assert len(set(train)) == 1500 and {len(word) for word in train} == set(range(3, 9))
    assert {split_of(word) for word in train} == {"train"} and not set(train) & set(held_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 1}, "min_length=1"),
        ({"min_length": 5, "max_length": 4}, "max_length=4"),
        ({"min_length": 2, "max_length": 2}, "no more than"),
    ],
)
def test_impossible_words_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        words(700, **changes)


def test_rows_are_proposals_and_solutions_in_turn() -> None:
    rows = sft_rows(100, seed=3)
    drawn = words(100, seed=3)
    for number, (row, word) in enumerate(zip(rows, drawn, strict=True)):
        question, answer = (message["content"] for message in row["messages"])
        if number % 2:
            assert (question, answer) == (f"reverse {word}", word[::-1])
        else:
            assert (question, answer) == (f"invent {word[:2]}", word)


def test_importing_the_package_and_its_rows_loads_nothing_heavy() -> None:
    program = (
        "import sys, prime_rl_environment_proposer as package; package.sft_rows(3);"
        "print([name for name in ('torch', 'numpy', 'triton', 'verifiers', 'transformers')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
