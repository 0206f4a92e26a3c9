"""The verifiers task set: reverse a word; the reward is the share of letters in the right place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated

import verifiers.v1 as vf
from pydantic import AfterValidator, Field

from prime_rl_environment_reverse_text.rows import PROMPT, check_prompt, question
from prime_rl_environment_reverse_text.scoring import character_accuracy
from prime_rl_environment_reverse_text.words import Split, random_words


class ReverseTextData(vf.TaskData):
    """One word to reverse."""

    answer: str
    """The word reversed."""


class ReverseTextTask(vf.Task[ReverseTextData]):
    """Scores the last reply against the answer."""

    @vf.reward
    async def character_accuracy(self, trace: vf.Trace) -> float:
        return character_accuracy(trace.last_reply, self.data.answer)

    @vf.metric
    async def exact_match(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class ReverseTextConfig(vf.TasksetConfig):
    """Which words, and how they are asked for."""

    split: Split = "train"
    """`train` or `held_out`; the two never share a word, whatever the other fields say."""
    seed: int = 0
    """Seed of the words."""
    num_tasks: int = Field(default=10_000, ge=1)
    """Number of words, all different."""
    min_length: int = Field(default=4, ge=1)
    """Shortest word, in letters."""
    max_length: int = Field(default=10, ge=1)
    """Longest word, in letters."""
    prompt: Annotated[str, AfterValidator(check_prompt)] = PROMPT
    """The user message; `{word}` stands for the word."""


class ReverseTextTaskset(vf.Taskset[ReverseTextTask, ReverseTextConfig]):
    """Deterministic words of one split."""

    def load(self) -> Iterator[ReverseTextTask]:
        config = self.config
        words = random_words(
            config.num_tasks,
            seed=config.seed,
            split=config.split,
            min_length=config.min_length,
            max_length=config.max_length,
        )
        for word in words:
            data = ReverseTextData(
                name=word, prompt=question(config.prompt, word), answer=word[::-1]
            )
            yield ReverseTextTask(data, config.task)
