"""The verifiers task set: a word, of which a proposer is told how it begins."""

from __future__ import annotations

from collections.abc import Iterator

import verifiers.v1 as vf
from pydantic import Field

from prime_rl_environment_proposer.questions import proposer_question, solver_question
from prime_rl_environment_proposer.scoring import solution_reward
from prime_rl_environment_proposer.words import BEGINNING_LETTERS, Split, random_words


class ProposerData(vf.TaskData):
    """One episode's beginning, or its word."""

    word: str
    """Solved as it is when words are given; else only its beginning counts."""

    @property
    def beginning(self) -> str:
        """What an invented word must begin with."""
        return self.word[:BEGINNING_LETTERS]


class ProposerTask(vf.Task[ProposerData]):
    """Asks for a word. What it is worth is known when its solvers are done."""


class SolverData(vf.TaskData):
    """One word to turn round."""

    word: str
    """The word."""


class SolverTask(vf.Task[SolverData]):
    """Scores the last reply against the word turned round."""

    @vf.reward
    async def solved(self, trace: vf.Trace) -> float:
        return solution_reward(trace.last_reply, self.data.word)


def solver_task(word: str) -> SolverTask:
    """The task that an episode's solvers are given."""
    return SolverTask(SolverData(name=word, prompt=solver_question(word), word=word))


class ProposerConfig(vf.TasksetConfig):
    """Which words."""

    split: Split = "train"
    """`train` or `held_out`; the two never share a word. Invented words may be of either."""
    seed: int = 0
    """Seed of the words."""
    num_tasks: int = Field(default=500, ge=1)
    """Number of words, all different."""
    min_length: int = Field(default=3, ge=2)
    """Shortest word, in letters."""
    max_length: int = Field(default=8, ge=2)
    """Longest word, in letters."""


class ProposerTaskset(vf.Taskset[ProposerTask, ProposerConfig]):
    """Deterministic words of one split."""

    def load(self) -> Iterator[ProposerTask]:
        config = self.config
        words = random_words(
            config.num_tasks,
            seed=config.seed,
            split=config.split,
            min_length=config.min_length,
            max_length=config.max_length,
        )
        for word in words:
            data = ProposerData(
                name=word, prompt=proposer_question(word[:BEGINNING_LETTERS]), word=word
            )
            yield ProposerTask(data, config.task)
