"""Evaluates a policy version on held-out tasks, and knows when it is due."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from prime_rl.configs.orchestrator import EvalSourcesConfig
from prime_rl.orchestrator.dispatch import GroupCancellation, GroupInFlight
from prime_rl.orchestrator.episode import EpisodeResult

log = logging.getLogger(__name__)

HOLD_S = 60.0
"""For so long after an evaluation began, new weights wait for its end: it measures one version. An
evaluation that takes longer goes on over newer weights instead of stopping training."""

WriteRow = Callable[[int, Mapping[str, float]], None]
"""(step, metrics) -> a line of eval.jsonl."""


def is_due(version: int, config: EvalSourcesConfig, max_steps: int) -> bool:
    """Version 0 (unless skipped), every interval, and the last."""
    if version == 0:
        return not config.skip_first_step
    return version == max_steps or version % config.interval == 0


class Evaluation:
    """One version on every task of every source; several may be under way."""

    def __init__(self, step: int, version: int, expected: Mapping[str, int]) -> None:
        self.step = step
        self.version = version
        self.missing = dict(expected)
        """Episodes still to come, by source."""
        self.results: dict[str, list[EpisodeResult]] = {source: [] for source in expected}
        self.started = time.monotonic()
        self.is_cut_short = False
        """Some episodes were cancelled: what is there is no result."""

    @property
    def is_complete(self) -> bool:
        """Everything has come."""
        return not any(self.missing.values())


class EvalSink:
    """Collects evaluation episodes and writes a row per source when its last one is there."""

    def __init__(
        self, task_counts: Mapping[str, int], group_sizes: Mapping[str, int], write: WriteRow
    ) -> None:
        self._task_counts = task_counts
        self._group_sizes = group_sizes
        self._write = write
        self._numbers = itertools.count()
        self._owners: dict[int, Evaluation] = {}
        self._running: list[Evaluation] = []
        self.latest: dict[str, float] = {}
        """Mean reward of the newest complete evaluation, by source."""

    @property
    def is_idle(self) -> bool:
        """No evaluation is under way."""
        return not self._running

    @property
    def holds_weights(self) -> bool:
        """An evaluation began so recently that the weights should stay as they are."""
        now = time.monotonic()
        return any(now - evaluation.started < HOLD_S for evaluation in self._running)

    def start(self, step: int, version: int, skip: Iterable[str] = ()) -> list[GroupInFlight]:
        """The groups to run for `version`, whose rows are written under `step`."""
        sources = [source for source in self._task_counts if source not in set(skip)]
        expected = {s: self._task_counts[s] * self._group_sizes[s] for s in sources}
        if not expected:
            return []
        evaluation = Evaluation(step, version, expected)
        self._running.append(evaluation)
        groups = []
        for source in sources:
            for task_index in range(self._task_counts[source]):
                group_id = next(self._numbers)
                self._owners[group_id] = evaluation
                groups.append(
                    GroupInFlight(
                        split="eval",
                        source=source,
                        group_id=group_id,
                        task_index=task_index,
                        size=self._group_sizes[source],
                        version=version,
                        step=step,
                    )
                )
        return groups

    def finished(self, result: EpisodeResult) -> None:
        """See Sink.finished."""
        evaluation = self._owners[result.request.group_id]
        evaluation.results[result.request.source].append(result)
        self._count(evaluation, result.request.source, 1)

    def cancelled(self, cancellation: GroupCancellation) -> None:
        """See Sink.cancelled."""
        evaluation = self._owners[cancellation.group_id]
        evaluation.is_cut_short = True
        self._count(evaluation, cancellation.source, cancellation.count)

    def _count(self, evaluation: Evaluation, source: str, number: int) -> None:
        evaluation.missing[source] -= number
        results = evaluation.results[source]
        if evaluation.missing[source] == 0 and not evaluation.is_cut_short:
            row = evaluation_metrics(source, results, evaluation.version)
            self._write(evaluation.step, row)
            self.latest[source] = row[f"eval/{source}/reward/mean"]
            log.info(
                "evaluation of version %d on %s: reward %.4f over %d episodes",
                evaluation.version,
                source,
                self.latest[source],
                len(results),
            )
        if evaluation.is_complete and evaluation in self._running:
            self._running.remove(evaluation)


def evaluation_metrics(
    source: str, results: Sequence[EpisodeResult], version: int
) -> dict[str, float]:
    """Failed episodes count as reward 0: leaving them out would reward failing."""
    count = len(results)

    def mean(values: Iterable[float]) -> float:
        return sum(values) / count

    names = sorted({name for result in results for name in result.metrics})
    row = {
        f"{name}/mean": mean(result.metrics.get(name, 0.0) for result in results)
        for name in names
        if name != "reward"
    }
    row |= {
        "reward/mean": mean(0.0 if result.failed else result.reward for result in results),
        "length/mean": mean(result.output_tokens for result in results),
        "errors/mean": mean(result.outcome == "error" for result in results),
        "timeouts/mean": mean(result.outcome == "timeout" for result in results),
        "truncated/mean": mean(result.outcome == "truncated" for result in results),
        "policy_version": version,
        "count": count,
    }
    row |= pass_metrics(results)
    return {f"eval/{source}/{name}": value for name, value in row.items()}


def pass_metrics(results: Sequence[EpisodeResult]) -> dict[str, float]:
    """pass@k (some of k succeed) and pass^k (all k do), k = powers of two up to the group size.

    Unbiased over the n episodes of a task with c successes: pass@k = 1 - C(n-c, k) / C(n, k),
    pass^k = C(c, k) / C(n, k). Only where every reward is 0 or 1 and groups are larger than one.
    """
    groups: dict[int, list[float]] = {}
    for result in results:
        reward = 0.0 if result.failed else result.reward
        groups.setdefault(result.request.group_id, []).append(reward)
    smallest = min(len(group) for group in groups.values())
    if smallest < 2 or any(r not in (0.0, 1.0) for group in groups.values() for r in group):
        return {}
    found: dict[str, float] = {}
    k = 1
    while k <= smallest:
        some, every = [], []
        for group in groups.values():
            n, c = len(group), int(sum(group))
            some.append(1 - math.comb(n - c, k) / math.comb(n, k))
            every.append(math.comb(c, k) / math.comb(n, k))
        found[f"pass@{k}"] = sum(some) / len(some)
        found[f"pass^{k}"] = sum(every) / len(every)
        k *= 2
    return found
