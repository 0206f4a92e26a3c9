"""Collects finished episodes into groups and groups into batches."""

from __future__ import annotations

import bisect
import logging
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from prime_rl.orchestrator.dispatch import GroupCancellation
from prime_rl.orchestrator.episode import EpisodeResult
from prime_rl.orchestrator.group import EpisodeFigures, ScoredEpisode, ScoredGroup
from prime_rl.orchestrator.policy import Progress, staleness

log = logging.getLogger(__name__)

LIVE_SHARE_GROUPS = 10
"""Groups over which the share of live episodes is averaged."""

Score = Callable[[Sequence[EpisodeResult]], ScoredGroup]


@dataclass
class Observed:
    """Everything that finished since the last batch, shipped or not."""

    episodes: list[EpisodeFigures] = field(default_factory=list)
    groups: int = 0
    groups_without_variance: int = 0
    groups_with_signal: int = 0
    """Groups that train something, with or without variance of their rewards."""
    dropped_stale: int = 0
    """Episodes of groups that were too old, in flight or in the queue."""
    rejected: Counter[str] = field(default_factory=Counter)
    """Groups that a gate turned down, by source."""
    sampled_tokens: int = 0
    """Of all episodes that came back."""
    wasted_tokens: Counter[str] = field(default_factory=Counter)
    """Sampled tokens of finished episodes that will not train, by reason: "stale", "overload",
    "rejected" (by a gate), "no_signal", "failed"."""
    cancelled: Counter[str] = field(default_factory=Counter)
    """Episodes that were started, or about to be, and then cancelled, by reason."""
    errors: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True)
class Batch:
    """What one step trains on."""

    episodes: Sequence[ScoredEpisode]
    observed: Observed


class TrainSink:
    """The queue between episodes and batches.

    Groups wait in the order they were drawn; a batch takes the earliest. With `constant`, only
    episodes that carry signal count and ship; otherwise all count and those without are left out.
    """

    def __init__(
        self,
        *,
        score: Score,
        close: Callable[[int], None],
        reopen: Callable[[int], None],
        group_sizes: dict[str, int],
        progress: Progress,
        batch_size: int,
        constant: bool,
        max_off_policy_steps: int,
        changed: Callable[[], None],
        never_stale: Collection[str] = (),
    ) -> None:
        self._score = score
        self._close = close
        self._reopen = reopen
        self._group_sizes = group_sizes
        self._progress = progress
        self._batch_size = batch_size
        self._constant = constant
        self._max_off_policy_steps = max_off_policy_steps
        self._changed = changed
        self._never_stale = frozenset(never_stale)
        self._collecting: dict[int, list[EpisodeResult]] = {}
        self._missing: dict[int, GroupCancellation] = {}
        self._queue: list[ScoredGroup] = []
        self.observed = Observed()
        self.live_share = 1.0
        """Share of episodes that carry signal, averaged over the last groups."""
        self.without_signal: list[EpisodeFigures] = []
        """Episodes that finished since the last one with signal."""

    def finished(self, result: EpisodeResult) -> None:
        """See Sink.finished."""
        request = result.request
        self.observed.sampled_tokens += result.output_tokens
        self._collecting.setdefault(request.group_id, []).append(result)
        self._complete(request.group_id, self._group_sizes[request.source])

    def cancelled(self, cancellation: GroupCancellation) -> None:
        """See Sink.cancelled."""
        self._missing[cancellation.group_id] = cancellation
        self._complete(cancellation.group_id, self._group_sizes[cancellation.source])

    def _complete(self, group_id: int, size: int) -> None:
        results = self._collecting.get(group_id, [])
        missing = self._missing.get(group_id)
        if len(results) + (missing.count if missing else 0) < size:
            return
        self._collecting.pop(group_id, None)
        self._missing.pop(group_id, None)
        for result in results:
            if result.error:
                self.observed.errors[result.error] += 1
        if missing is None:
            self._add(self._score(results))
            return
        self._waste(missing.reason, sum(result.output_tokens for result in results))
        self.observed.cancelled[missing.reason] += missing.count
        if missing.reason == "stale":
            self._close(group_id)
            self.observed.dropped_stale += size
        elif missing.reason == "overload":
            self._reopen(group_id)

    def _waste(self, reason: str, tokens: int) -> None:
        if tokens:
            self.observed.wasted_tokens[reason] += tokens

    def _add(self, group: ScoredGroup) -> None:
        figures = [episode.figures for episode in group.episodes]
        self.observed.episodes += figures
        self.observed.groups += 1
        self.observed.groups_without_variance += not group.has_variance
        self.observed.groups_with_signal += group.live > 0 and not group.is_rejected
        share = group.live / len(figures) if self._constant else 1.0
        share = 0.0 if group.is_rejected else share
        self.live_share += (share - self.live_share) / LIVE_SHARE_GROUPS
        if group.live and not group.is_rejected:
            self.without_signal.clear()
        else:
            self.without_signal += figures
        self._waste_of(group)
        if group.is_rejected or (self._constant and not group.live):
            self._close(group.group_id)
        else:
            bisect.insort(self._queue, group, key=lambda each: each.group_id)
            self.sweep()
        self._changed()

    def _waste_of(self, group: ScoredGroup) -> None:
        """Count what a group that has just been scored will never train."""
        self.observed.rejected[group.source] += group.is_rejected
        for episode in group.episodes:
            if episode.figures.outcome in ("error", "timeout"):
                self._waste("failed", episode.figures.output_tokens)
            elif not episode.is_live or group.is_rejected:
                reason = "rejected" if group.is_rejected else "no_signal"
                self._waste(reason, episode.figures.output_tokens)

    def restore(self, group: ScoredGroup) -> None:
        """Put back the rest of a group that an earlier run had begun to ship."""
        bisect.insort(self._queue, group, key=lambda each: each.group_id)

    def sweep(self) -> None:
        """Drop whole groups that are older than the bound allows for the step being filled. This
        is the guarantee; cancelling in flight only saves work."""
        kept = []
        for group in self._queue:
            if self._age(group) > self._max_off_policy_steps:
                rest = group.episodes[group.shipped :]
                self.observed.dropped_stale += len(rest)
                self._waste("stale", sum(e.figures.output_tokens for e in rest if e.is_live))
                self._close(group.group_id)
            else:
                kept.append(group)
        self._queue = kept

    def queued_staleness(self) -> list[int]:
        """Staleness of every group that waits and grows stale."""
        return [self._age(group) for group in self._queue if group.source not in self._never_stale]

    def _age(self, group: ScoredGroup) -> int:
        """Staleness for the step being filled; 0 for what a frozen model played."""
        if group.source in self._never_stale:
            return 0
        return staleness(self._progress.step, group.version)

    @property
    def available(self) -> int:
        """Episodes that count towards the next batch."""
        if self._constant:
            return sum(group.live for group in self._queue)
        return sum(len(group.episodes) - group.shipped for group in self._queue)

    @property
    def is_ready(self) -> bool:
        """A whole batch waits."""
        return self.has(self._batch_size)

    def has(self, count: int) -> bool:
        """At least `count` episodes wait that count."""
        return self.available >= count

    def take(self) -> Batch:
        """The next batch; call it when `is_ready`. Of the last group only a part may ship."""
        taken = self.take_episodes(self._batch_size)
        observed, self.observed = self.observed, Observed()
        return Batch(taken, observed)

    def take_episodes(self, count: int) -> list[ScoredEpisode]:
        """The next `count` episodes, of `available` ones; those without signal are left out."""
        taken: list[ScoredEpisode] = []
        counted = 0
        while counted < count:
            group = self._queue[0]
            episode = group.episodes[group.shipped]
            group.shipped += 1
            group.live -= episode.is_live
            counted += episode.is_live or not self._constant
            if episode.is_live:
                taken.append(episode)
            exhausted = group.live == 0 if self._constant else group.shipped == len(group.episodes)
            if exhausted:
                self._queue.pop(0)
                self._close(group.group_id)
        return taken

    def partly_shipped(self) -> list[ScoredGroup]:
        """Groups of which a part has shipped; a checkpoint keeps their rest."""
        return [group for group in self._queue if group.shipped]
