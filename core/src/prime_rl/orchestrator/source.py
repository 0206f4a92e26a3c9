"""The order in which tasks are drawn, such that a resumed run goes on where it was."""

from __future__ import annotations

import bisect
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from prime_rl.errors import CheckpointError
from prime_rl.orchestrator.curriculum import Sampler, StandardSampler
from prime_rl.orchestrator.stored import OTHER_WAY, NotNegative, as_stored, is_damaged


@dataclass(frozen=True)
class SourceShare:
    """What drawing needs to know of a source."""

    label: str
    tasks: int
    """Number of tasks."""
    ratio: float
    """Weight against the other sources."""


@dataclass(frozen=True, order=True)
class Draw:
    """A task to run a group of."""

    number: int
    """Place in the order, from 0; the group's id."""
    source: str
    task_index: int


class _StoredSource(msgspec.Struct):
    # Fields with a default are absent from older checkpoints.
    drawn: NotNegative
    counts: dict[str, NotNegative]
    open: list[tuple[NotNegative, str, NotNegative]]
    samplers: dict[str, dict[str, Any]] = {}


class TrainSource:
    """Draws tasks. Draw k's source depends on (seed, k) only, its task on how often the source came
    and on the source's sampler (by default: in order, over and over).

    A draw is open until it is closed: trained on, or dropped for good. A checkpoint holds the
    counters, the samplers' states and the open draws; after a resume the open ones come first, in
    their old order, so that nothing is skipped and nothing comes twice.
    """

    def __init__(
        self,
        shares: Sequence[SourceShare],
        seed: int,
        samplers: Mapping[str, Sampler] | None = None,
    ) -> None:
        self._shares = {share.label: share for share in shares}
        standard = {share.label: StandardSampler(share.tasks) for share in shares}
        self.samplers: dict[str, Sampler] = {**standard, **(samplers or {})}
        """By source."""
        self._seed = seed
        self._drawn = 0
        self._counts = dict.fromkeys(self._shares, 0)
        self._open: dict[int, Draw] = {}
        self._again: list[Draw] = []

    def draw(self) -> Draw:
        """The next task."""
        if self._again:
            return self._again.pop(0)
        labels = list(self._shares)
        weights = [self._shares[label].ratio for label in labels]
        chooser = random.Random(f"{self._seed}/{self._drawn}")
        label = chooser.choices(labels, weights)[0]
        task_index = self.samplers[label].choose(self._counts[label])
        draw = Draw(self._drawn, label, task_index)
        self._counts[label] += 1
        self._drawn += 1
        self._open[draw.number] = draw
        return draw

    def close(self, number: int) -> None:
        """The draw is done with. Unknown numbers are refused: a draw closes once."""
        del self._open[number]

    def reopen(self, number: int) -> None:
        """The group of an open draw was given up; it is drawn again before any new one."""
        bisect.insort(self._again, self._open[number])

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "drawn": self._drawn,
            "counts": dict(self._counts),
            "open": [[d.number, d.source, d.task_index] for d in sorted(self._open.values())],
            "samplers": {label: each.state_dict() for label, each in self.samplers.items()},
        }

    def load_state_dict(self, state: dict[str, Any], kept: Collection[int] = ()) -> None:
        """Go on from a checkpoint. Open draws come again but for those in `kept`: their episodes
        are at hand. Raises CheckpointError when the state is damaged or the sources are not those
        of the checkpoint."""
        stored = as_stored(state, _StoredSource, "the order of tasks")
        if set(stored.counts) != set(self._shares):
            raise CheckpointError(
                f"the checkpoint was made with the sources {sorted(stored.counts)}, this run has "
                f"{sorted(self._shares)}; use the same, or resume.skip_dataloader = true"
            )
        numbers = {number for number, _, _ in stored.open}
        if len(numbers) < len(stored.open) or any(number >= stored.drawn for number in numbers):
            problem = f"{stored.drawn} were made, and open are others or one twice"
            raise is_damaged("the order of tasks", problem, sorted(n for n, _, _ in stored.open))
        if not numbers.issuperset(kept):
            raise CheckpointError(
                f"unfinished groups {sorted(set(kept) - numbers)} belong to no open draw; open are "
                f"{sorted(numbers)}. {OTHER_WAY}"
            )
        for number, label, task_index in stored.open:
            if label not in self._shares:
                raise CheckpointError(
                    f"draw {number} is of source {label!r}, this run has {sorted(self._shares)}. "
                    f"{OTHER_WAY}"
                )
            if task_index >= self._shares[label].tasks:
                raise CheckpointError(
                    f"source {label!r} has {self._shares[label].tasks} tasks, the checkpoint "
                    f"(draw {number}) needs task {task_index}; the task set has changed. Use the old "
                    "one, or resume.skip_dataloader = true"
                )
        for label, sampler in self.samplers.items():
            sampler.load_state_dict(stored.samplers.get(label, {}))
        self._drawn = stored.drawn
        self._counts = dict(stored.counts)
        draws = [Draw(*entry) for entry in stored.open]
        self._open = {draw.number: draw for draw in draws}
        self._again = [draw for draw in draws if draw.number not in set(kept)]
