"""Sums, the calculator and fine-tuning rows, with values worked out by hand."""

from __future__ import annotations

import subprocess
import sys

import pytest
from prime_rl_environment_calculator import sft_rows
from prime_rl_environment_calculator.sums import Sum, random_sums, split_of
from prime_rl_environment_calculator.tool import calculate, called_expression


def sums(count: int, **changes) -> list[Sum]:
    settings = {
        "seed": 0,
        "split": "train",
        "min_operations": 1,
        "max_operations": 3,
        "max_number": 99,
    }
    return list(random_sums(count, **{**settings, **changes}))


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("3 add 14", "17"),
        ("17 sub 5", "12"),
        ("5 sub 17", "-12"),
        ("-12 add 2", "-10"),
        ("003 add 1", "4"),
        ("3 add", "error"),
        ("3 add 4 add 5", "error"),
        ("3  add 4", "error"),
        ("3 mul 4", "error"),
        ("3 add 1234567", "error"),
        ("", "error"),
        ("__import__('os')", "error"),
    ],
)
def test_the_calculator_reads_two_numbers_and_refuses_the_rest(expression, result) -> None:
    assert calculate(expression) == result


@pytest.mark.parametrize(
    ("reply", "expression"),
    [
        ("<tool_call>3 add 14</tool_call>", "3 add 14"),
        ("17", None),
        ("", None),
        ("</tool_call>", None),
        ("<tool_call>3 add 14", "3 add 14"),
        ("so <tool_call>3 add 14</tool_call>", "so <tool_call>3 add 14"),
        (
            "<tool_call>1 add 1</tool_call><tool_call>2 add 2</tool_call>",
            "1 add 1</tool_call><tool_call>2 add 2",
        ),
    ],
)
def test_a_reply_with_a_call_in_it_is_one(reply, expression) -> None:
    assert called_expression(reply) == expression


def test_every_sum_is_its_own_calls_worked_out_from_left_to_right() -> None:
    for found in sums(500):
        first, *rest = found.text.split(" ")
        value = int(first)
        assert 1 <= value <= 99
        for call, result, operation, number in zip(
            found.calls, found.results, rest[::2], rest[1::2], strict=True
        ):
            assert call == f"{value} {operation} {number}"
            value += int(number) if operation == "add" else -int(number)
            assert result == str(value) and value >= 0
        assert found.answer == str(value)
    assert {len(found.calls) for found in sums(100)} == {1, 2, 3}


def test_sums_are_distinct_the_same_every_time_and_of_one_split() -> None:
    train = [found.text for found in sums(2000)]
    assert [found.text for found in sums(20)] == train[:20]
    assert len(set(train)) == 2000 and {split_of(text) for text in train} == {"train"}
    held_out = [f.text for seed in range(3) for f in sums(300, seed=seed, split="held_out")]
    assert not set(train) & set(held_out)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"min_operations": 0}, "min_operations=0"),
        ({"min_operations": 3, "max_operations": 2}, "max_operations=2"),
        ({"max_operations": 1, "max_number": 2}, "no more than"),
    ],
)
def test_impossible_sums_are_refused(changes, message) -> None:
    with pytest.raises(ValueError, match=message):
        sums(100, **changes)


def test_rows_show_every_call_with_its_answer() -> None:
    [row] = [row for row in sft_rows(50) if row["messages"][0]["content"] == "9 add 62 sub 15"]
    assert [(m["role"], m["content"]) for m in row["messages"]] == [
        ("user", "9 add 62 sub 15"),
        ("assistant", "<tool_call>9 add 62</tool_call>"),
        ("tool", "71"),
        ("assistant", "<tool_call>71 sub 15</tool_call>"),
        ("tool", "56"),
        ("assistant", "56"),
    ]


def test_rows_are_the_sums_of_the_task_set() -> None:
    from prime_rl_environment_calculator import CalculatorTaskset
    from prime_rl_environment_calculator.taskset import CalculatorConfig

    tasks = list(CalculatorTaskset(CalculatorConfig(num_tasks=30, seed=2, max_operations=2)))
    rows = sft_rows(30, seed=2, max_operations=2)
    assert [row["messages"][0]["content"] for row in rows] == [t.data.prompt for t in tasks]
    assert [row["messages"][-1]["content"] for row in rows] == [t.data.answer for t in tasks]
    assert len({task.key for task in tasks}) == 30


def test_importing_the_package_and_its_rows_loads_nothing_heavy() -> None:
    program = (
        "import sys, prime_rl_environment_calculator as package; package.sft_rows(3);"
        "print([name for name in ('torch', 'numpy', 'triton', 'verifiers', 'transformers')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
