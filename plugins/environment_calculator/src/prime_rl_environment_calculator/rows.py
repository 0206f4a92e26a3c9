"""Sums worked out correctly, as chat examples for supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from prime_rl_environment_calculator.sums import Split, Sum, random_sums
from prime_rl_environment_calculator.tool import written_call


def conversation(problem: Sum) -> list[dict[str, str]]:
    """The sum, every call with the calculator's answer, and the final answer."""
    messages = [{"role": "user", "content": problem.text}]
    for number, (call, result) in enumerate(zip(problem.calls, problem.results, strict=True)):
        messages.append({"role": "assistant", "content": written_call(call)})
        messages.append({"role": "tool", "content": result, "tool_call_id": f"call-{number}"})
    return [*messages, {"role": "assistant", "content": problem.answer}]


def sft_rows(
    count: int,
    *,
    seed: int = 0,
    split: Split = "train",
    min_operations: int = 1,
    max_operations: int = 3,
    max_number: int = 99,
) -> list[dict[str, Any]]:
    """`count` rows of one split, `{"messages": [user, assistant, tool, ..., assistant]}`.

    Same distribution of sums as the task set with the same arguments; rows of the training split
    never contain a held-out sum.
    """
    sums = random_sums(
        count,
        seed=seed,
        split=split,
        min_operations=min_operations,
        max_operations=max_operations,
        max_number=max_number,
    )
    return [{"messages": conversation(problem)} for problem in sums]
