"""The verifiers task set: work out a sum; the reward is 1 for the right answer."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prime_rl_environment_calculator.sums import Split, random_sums
from prime_rl_environment_calculator.tool import REFUSAL, called_expression


class CalculatorData(vf.TaskData):
    """One sum."""

    answer: str
    """Its value."""
    calls: list[str]
    """What to ask the calculator, in order."""


class CalculatorTask(vf.Task[CalculatorData]):
    """Scores the last reply, and counts how the calculator was used."""

    @vf.reward
    async def right_answer(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)

    @vf.metric
    async def calculator(self, trace: vf.Trace) -> dict[str, float]:
        """calls: results that came back. refused_calls: those it could not read. right_calls: share
        of the calls wanted that were made, in order, before the first other one."""
        replies = [message.content or "" for message in trace.assistant_messages]
        made = [called_expression(reply.strip()) for reply in replies]
        right = 0
        for wanted, expression in zip(self.data.calls, made, strict=False):
            if expression != wanted:
                break
            right += 1
        results = [message.content for message in trace.tool_messages]
        return {
            "calls": len(results),
            "refused_calls": results.count(REFUSAL),
            "right_calls": right / len(self.data.calls),
        }


class CalculatorConfig(vf.TasksetConfig):
    """Which sums."""

    split: Split = "train"
    """`train` or `held_out`; the two never share a sum, whatever the other fields say."""
    seed: int = 0
    """Seed of the sums."""
    num_tasks: int = Field(default=10_000, ge=1)
    """Number of sums, all different."""
    min_operations: int = Field(default=1, ge=1)
    """Fewest operations of a sum, each of which is a call of the calculator."""
    max_operations: int = Field(default=3, ge=1)
    """Most operations of a sum."""
    max_number: int = Field(default=99, ge=1, le=9999)
    """Largest number."""


class CalculatorTaskset(vf.Taskset[CalculatorTask, CalculatorConfig]):
    """Deterministic sums of one split."""

    def load(self) -> Iterator[CalculatorTask]:
        config = self.config
        sums = random_sums(
            config.num_tasks,
            seed=config.seed,
            split=config.split,
            min_operations=config.min_operations,
            max_operations=config.max_operations,
            max_number=config.max_number,
        )
        for found in sums:
            data = CalculatorData(
                name=found.text, prompt=found.text, answer=found.answer, calls=list(found.calls)
            )
            yield CalculatorTask(data, self.config.task)
