"""Task set of `staleness.py`: words to reverse, whose episodes end some seconds after the reply."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import verifiers.v1 as vf
from prime_rl_environment_reverse_text import ReverseTextTaskset
from prime_rl_environment_reverse_text.scoring import character_accuracy
from prime_rl_environment_reverse_text.taskset import ReverseTextConfig, ReverseTextData

from prime_rl.api.environment import InProcessHarness

__all__ = ["InProcessHarness", "LateTaskset"]


class LateData(ReverseTextData):
    """One word to reverse."""

    late_s: float
    """Seconds from the reply to the end of the episode."""


class LateTask(vf.Task[LateData]):
    """Scores the reply, but not at once."""

    @vf.reward
    async def character_accuracy(self, trace: vf.Trace) -> float:
        await asyncio.sleep(self.data.late_s)
        return character_accuracy(trace.last_reply, self.data.answer)


class LateConfig(ReverseTextConfig):
    """Which words, and how late."""

    late_s: float = 0.0
    """Seconds from a reply to the end of its episode."""


class LateTaskset(vf.Taskset[LateTask, LateConfig]):
    """The words of `ReverseTextTaskset`."""

    def load(self) -> Iterator[LateTask]:
        shared = self.config.model_dump(exclude={"late_s", "task", "id"})
        for task in ReverseTextTaskset(ReverseTextConfig(**shared)):
            data = LateData(**task.data.model_dump(), late_s=self.config.late_s)
            yield LateTask(data, self.config.task)
