"""Words, splits, rewards and fine-tuning rows, with values worked out by hand."""

from __future__ import annotations

import subprocess
import sys
from itertools import islice

import pytest
from prime_rl_environment_reverse_text import sft_rows
from prime_rl_environment_reverse_text.scoring import character_accuracy
from prime_rl_environment_reverse_text.words import random_words, split_of


def words(count: int, **changes) -> list[str]:
    settings = {"seed": 0, "split": "train", "min_length": 4, "max_length": 10}
    return list(random_words(count, **{**settings, **changes}))


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        ("olleh", 1.0),
        ("ollex", 4 / 5),
        ("hello", 1 / 5),  # only the middle letter stays where it is
        ("oll", 3 / 5),  # two letters are missing
        ("ollehh", 5 / 6),  # one too many
        ("olleh" + "x" * 15, 5 / 20),
        ("xolleh", 1 / 6),  # shifted by one: o l l e h against x o l l e h
        ("OLLEH", 0.0),
        ("", 0.0),
    ],
)
def test_character_accuracy_of_replies_to_hello(reply: str, expected: float) -> None:
    assert character_accuracy(reply, "olleh") == pytest.approx(expected, abs=1e-12)


def test_character_accuracy_of_nothing_against_nothing() -> None:
    assert character_accuracy("", "") == 1.0


def test_splits_never_share_a_word_whatever_the_seeds() -> None:
    train = {word for seed in range(5) for word in words(400, seed=seed)}
    held_out = {word for seed in range(5) for word in words(400, seed=seed, split="held_out")}
    assert len(train) > 1900 and len(held_out) > 1900
    assert not train & held_out
    assert {split_of(word) for word in train} == {"train"}


def test_one_word_in_eight_is_held_out() -> None:
    source = words(2000, min_length=3, max_length=3)  # all of them training words
    every = [a + b + c for a in "abcdefghijklm" for b in "abcdefghijklm" for c in "nopqrstuvwxyz"]
    share = sum(split_of(word) == "held_out" for word in every) / len(every)
    assert abs(share - 1 / 8) < 0.03
    assert len(source) == 2000


def test_words_are_the_same_in_every_process_and_version() -> None:
    assert words(3) == PINNED
    assert words(3, seed=1) != PINNED
    assert words(50)[:3] == PINNED  # a longer list only continues


PINNED = ["uvbeacdy", "vmkrtckviz", "xckxdpoeca"]


def test_words_are_distinct_and_within_the_lengths() -> None:
    drawn = words(3000, min_length=4, max_length=6)
    assert len(set(drawn)) == 3000
    assert {len(word) for word in drawn} == {4, 5, 6}
    assert all(word.isascii() and word.islower() and word.isalpha() for word in drawn)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_length": 0}, "min_length=0"),
        ({"min_length": 7, "max_length": 6}, "max_length=6"),
        ({"min_length": 1, "max_length": 1}, "at most 11 "),
    ],
)
def test_impossible_words_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        words(100, **changes)


def test_rows_are_the_task_words_with_the_right_answer() -> None:
    rows = sft_rows(200, seed=3)
    drawn = words(200, seed=3)
    assert [row["messages"][1]["content"][::-1] for row in rows] == drawn
    assert rows[0]["messages"][0] == {"role": "user", "content": f"reverse {drawn[0]}"}
    held_out = set(words(500, seed=3, split="held_out"))
    assert not held_out & set(drawn)


def test_rows_take_another_prompt() -> None:
    (row,) = sft_rows(1, prompt="{word} =", min_length=5, max_length=5)
    question, answer = (message["content"] for message in row["messages"])
    assert question == f"{answer[::-1]} =" and len(answer) == 5


def test_hints_tell_the_answer_and_the_word_asked_for_does_not() -> None:
    rows = sft_rows(1000, seed=3, hint_share=0.75)
    hinted = [row["messages"] for row in rows if row["messages"][0]["role"] == "system"]
    assert 700 < len(hinted) < 800
    assert all(hint["content"] == answer["content"] for hint, _, answer in hinted)
    asked = sum(
        question["content"] == f"reverse {said['content'][::-1]}" for _, question, said in hinted
    )
    assert asked < 5
    plain = [row["messages"] for row in rows if len(row["messages"]) == 2]
    assert all(
        question["content"] == f"reverse {said['content'][::-1]}" for question, said in plain
    )


@pytest.mark.parametrize("share", [-0.1, 1.5, float("nan")])
def test_a_share_of_hints_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        sft_rows(1, hint_share=share)


def test_tasks_carry_prompt_and_answer() -> None:
    from prime_rl_environment_reverse_text import ReverseTextTaskset
    from prime_rl_environment_reverse_text.taskset import ReverseTextConfig

    taskset = ReverseTextTaskset(ReverseTextConfig(num_tasks=50, seed=9, split="held_out"))
    tasks = list(taskset)
    assert [task.data.name for task in tasks] == words(50, seed=9, split="held_out")
    assert all(task.data.answer == task.data.name[::-1] for task in tasks)
    assert tasks[0].data.prompt == f"reverse {tasks[0].data.name}"
    assert len({task.key for task in tasks}) == 50
    assert [task.key for task in islice(taskset, 2)] == [task.key for task in tasks[:2]]


def test_a_prompt_without_the_word_is_refused() -> None:
    from prime_rl_environment_reverse_text.taskset import ReverseTextConfig

    with pytest.raises(ValueError, match="{word}"):
        ReverseTextConfig(prompt="reverse it")
    with pytest.raises(ValueError, match="{word}"):
        sft_rows(1, prompt="reverse it")


def test_importing_the_package_and_its_rows_loads_nothing_heavy() -> None:
    program = (
        "import sys, prime_rl_environment_reverse_text as package; package.sft_rows(3);"
        "print([name for name in ('torch', 'numpy', 'triton', 'verifiers', 'transformers')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
