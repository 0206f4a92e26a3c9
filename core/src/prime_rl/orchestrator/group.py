"""A complete group: scored by its algorithm, its samples weighted and pruned."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prime_rl.api.algorithm import (
    Algorithm,
    Branch,
    Credit,
    Episode,
    Group,
    ReferenceContext,
)
from prime_rl.configs.curriculum import AdvantageRangeConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.arrays import LARGEST_FLOAT32, are_finite, fit_float32
from prime_rl.orchestrator.columns import ReferenceView, SampleColumns
from prime_rl.orchestrator.curriculum import is_rejected
from prime_rl.orchestrator.episode import AgentTrace, EpisodeResult
from prime_rl.orchestrator.samples import content_roles
from prime_rl.wire import TrainingSample

log = logging.getLogger(__name__)

ViewOfContext = Callable[[ReferenceContext, Sequence[int]], ReferenceView]
"""(context, token ids of the branch) -> what the reference is given."""


CREDIT_STREAMS = tuple(stream.name for stream in dataclasses.fields(Credit))


@dataclass(frozen=True)
class EpisodeFigures:
    """What metrics need of an episode once its tokens are packed away."""

    source: str
    outcome: str
    reward: float
    input_tokens: int
    output_tokens: int
    turns: int
    forks: int
    duration_s: float
    version: int
    is_frozen: bool = False
    """A frozen model played it: it has no age."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The environment's own, see EpisodeResult.metrics."""


@dataclass(frozen=True)
class Annotation:
    """Advantages of one branch, for the trace."""

    trace_id: str
    branch_index: int
    values: Sequence[float]
    mask: Sequence[bool]

    @property
    def advantages(self) -> list[float | None]:
        """One per token, None where it does not train."""
        pairs = zip(self.values, self.mask, strict=True)
        return [advantage if trainable else None for advantage, trainable in pairs]


@dataclass(frozen=True)
class ScoredEpisode:
    """An episode ready for a batch."""

    figures: EpisodeFigures
    samples: Sequence[SampleColumns]
    """Samples with at least one token that trains; empty when the episode carries no signal."""
    annotations: Sequence[Annotation] = ()

    @property
    def is_live(self) -> bool:
        """It trains at least one token."""
        return bool(self.samples)


@dataclass
class ScoredGroup:
    """The episodes of one task, in order of their member number."""

    group_id: int
    source: str
    version: int
    episodes: list[ScoredEpisode]
    has_variance: bool
    """Not all rewards of some agent are equal in the scored episodes."""
    shipped: int = 0
    """Episodes of `episodes` that earlier batches took."""
    is_rejected: bool = False
    """A gate of its source turns it down: none of it trains."""
    live: int = field(init=False)
    """Live episodes not yet taken."""

    def __post_init__(self) -> None:
        self.live = sum(episode.is_live for episode in self.episodes[self.shipped :])


def score(
    algorithm: Algorithm,
    results: Sequence[EpisodeResult],
    task_key: str,
    gates: Sequence[AdvantageRangeConfig] = (),
    *,
    task: Mapping[str, Any] | None = None,
    view: ViewOfContext | None = None,
) -> ScoredGroup:
    """Credit from the algorithm onto every sample of every episode, then the gates' verdict.

    Tokens whose advantage is exactly 0 get the rl weight 0; a sample without any weighted token is
    dropped. `view` turns what the algorithm shows the reference before a branch into tokens. A group
    with advantages that float32 does not hold fails as a whole. Raises RunError when the algorithm
    returns something else than its contract says.
    """
    results = sorted(results, key=lambda result: result.request.member)
    first = results[0].request
    samples = [[s for trace in result.traces for s in trace.samples] for result in results]
    with_roles = algorithm.requirements.roles
    episodes = [_episode(result, with_roles) for result in results]
    group = Group(first.source, task_key, episodes, task or {})
    try:
        credits = algorithm.score_group(group)
    except OverflowError as error:
        results, credits = _give_up(results, samples, task_key, str(error))
    _check_credits(algorithm, credits, samples)
    if not all(fit_float32(c.advantages or ()) for branches in credits for c in branches):
        why = f"float32, which the trainer computes in, holds at most {LARGEST_FLOAT32:.2g}"
        results, credits = _give_up(results, samples, task_key, why)
    views = _reference_views(algorithm, group, credits, view)
    scored = [
        _scored(result, own, credit, seen, algorithm.requirements.sampled_by == "frozen")
        for result, own, credit, seen in zip(results, samples, credits, views, strict=True)
    ]
    return ScoredGroup(
        group_id=first.group_id,
        source=first.source,
        version=first.version,
        episodes=scored,
        has_variance=_has_variance(results),
        is_rejected=bool(gates) and is_rejected(gates, advantage_range(credits, samples)),
    )


def _give_up(
    results: Sequence[EpisodeResult],
    samples: Sequence[Sequence[TrainingSample]],
    task_key: str,
    why: str,
) -> tuple[list[EpisodeResult], list[list[Credit]]]:
    """The episodes of a group whose advantages overflow: all failed, none with credit."""
    rewards = [result.reward for result in results if not result.failed]
    text = f"DamagedGroup: rewards {rewards} give advantages that overflow: {why}"
    log.warning("source %r, task %s: %s", results[0].request.source, task_key, text)
    failed = [
        result if result.failed else dataclasses.replace(result, outcome="error", error=text)
        for result in results
    ]
    return failed, [[Credit() for _ in own] for own in samples]


def _has_variance(results: Sequence[EpisodeResult]) -> bool:
    """Per agent: what the players of one game win together is the same in every game."""
    rewards: dict[str, set[float]] = {}
    for result in results:
        for trace in result.traces:
            if trace.trainable and not result.failed:
                rewards.setdefault(trace.agent, set()).add(trace.reward)
    return any(len(found) > 1 for found in rewards.values())


def advantage_range(
    credits: Sequence[Sequence[Credit]], samples: Sequence[Sequence[TrainingSample]]
) -> tuple[float, float] | None:
    """Smallest and largest advantage of a trainable token; None when there are no advantages:
    nothing could be scored, or the algorithm gives credit of another kind."""
    found: set[float] = set()
    for branches, own in zip(credits, samples, strict=True):
        for credit, sample in zip(branches, own, strict=True):
            if credit.advantages is not None:
                found.update(itertools.compress(credit.advantages, sample.mask))
    return (min(found), max(found)) if found else None


def _check_credits(
    algorithm: Algorithm,
    credits: Sequence[Sequence[Credit]],
    samples: Sequence[Sequence[TrainingSample]],
) -> None:
    """Raises RunError: an algorithm that returns another shape or numbers that are none would train
    the wrong tokens or ruin the weights."""
    found = [len(branches) for branches in credits]
    expected = [len(branches) for branches in samples]
    name = type(algorithm).__name__
    if found != expected:
        raise RunError(
            f"{name}.score_group returned credit for {found} branches per episode, expected "
            f"{expected}"
        )
    for branches, own in zip(credits, samples, strict=True):
        for credit, sample in zip(branches, own, strict=True):
            for stream in CREDIT_STREAMS:
                values = getattr(credit, stream)
                if values is None:
                    continue
                if len(values) != len(sample.token_ids):
                    raise RunError(
                        f"{name}.score_group returned {len(values)} {stream} for a branch of "
                        f"{len(sample.token_ids)} tokens"
                    )
                if not are_finite(values):
                    raise RunError(f"{name}.score_group returned {stream} that are not finite")
                if stream != "advantages" and not fit_float32(values):
                    raise RunError(
                        f"{name}.score_group returned {stream} up to {max(map(abs, values)):g}, and "
                        f"float32, which the trainer computes in, holds {LARGEST_FLOAT32:.2g}"
                    )
                if stream == "ref_kl_weights" and any(
                    itertools.compress(values, map(operator.not_, sample.mask))
                ):
                    raise RunError(
                        f"{name}.score_group returned {stream} on tokens that the policy did not "
                        "sample; there is no importance ratio for them"
                    )


def _episode(result: EpisodeResult, with_roles: bool) -> Episode:
    return Episode(
        id=result.id,
        outcome=result.outcome,
        reward=result.reward,
        branches=[
            Branch(
                agent=trace.agent,
                token_ids=sample.token_ids,
                mask=sample.mask,
                reward=trace.reward,
                trace=number,
                roles=_roles(trace, place) if with_roles else (),
            )
            for number, trace in enumerate(result.traces)
            for place, sample in enumerate(trace.samples)
        ],
        input_tokens=result.input_tokens,
        turns=result.turns,
    )


def _roles(trace: AgentTrace, place: int) -> Sequence[str]:
    return content_roles(trace.paths[place], len(trace.samples[place].token_ids))


def _reference_views(
    algorithm: Algorithm,
    group: Group,
    credits: Sequence[Sequence[Credit]],
    view: ViewOfContext | None,
) -> list[list[ReferenceView | None]]:
    """Per episode and branch; None where the reference sees the branch as it is, or not at all.
    Raises RunError when the task lacks what the algorithm needs."""

    def of(branch: Branch, credit: Credit) -> ReferenceView | None:
        if view is None or credit.ref_kl_weights is None:
            return None
        try:
            context = algorithm.reference_context(branch, group.task)
        except ValueError as error:
            raise RunError(f"source {group.env_name!r}, task {group.task_key}: {error}") from error
        return view(context, branch.token_ids) if context else None

    return [
        [of(branch, credit) for branch, credit in zip(episode.branches, branches, strict=True)]
        for episode, branches in zip(group.episodes, credits, strict=True)
    ]


def _scored(
    result: EpisodeResult,
    samples: Sequence[TrainingSample],
    credits: Sequence[Credit],
    views: Sequence[ReferenceView | None],
    is_frozen: bool,
) -> ScoredEpisode:
    columns, annotations = [], []
    for sample, credit, view in zip(samples, credits, views, strict=True):
        if not apply_credit(sample, credit):
            continue
        columns.append(SampleColumns.of(sample, view))
        annotations.append(_annotation(sample))
    return ScoredEpisode(
        figures=EpisodeFigures(
            source=result.request.source,
            outcome=result.outcome,
            reward=result.reward,
            input_tokens=result.input_tokens,
            output_tokens=result.output_tokens,
            turns=result.turns,
            forks=sum(trace.forks for trace in result.traces),
            duration_s=result.duration_s,
            version=result.request.version,
            is_frozen=is_frozen,
            metrics=result.metrics,
        ),
        samples=columns,
        annotations=annotations,
    )


def apply_credit(sample: TrainingSample, credit: Credit) -> bool:
    """Write the credit's streams into the sample; True when some token trains.

    rl weights are written out only where they differ from 1 on every trainable token. A token with a
    ce weight that nobody sampled is learned at temperature 1.
    """
    trains = False
    if credit.advantages is not None:
        sample.advantages = list(credit.advantages)
        sample.rl_weights, trains = _rl_weights(sample.mask, credit.advantages, credit.rl_weights)
    sample.ce_weights = _stream(credit.ce_weights)
    sample.ref_kl_weights = _stream(credit.ref_kl_weights)
    if sample.ce_weights is not None:
        sample.temperatures = [
            1.0 if weight and not sampled else temperature
            for temperature, weight, sampled in zip(
                sample.temperatures, sample.ce_weights, sample.mask, strict=True
            )
        ]
    for other in (sample.ce_weights, sample.ref_kl_weights):
        trains = trains or (other is not None and any(other))
    if credit.advantages is None and trains:
        sample.rl_weights = [0.0] * len(sample.token_ids)
        sample.advantages = [0.0] * len(sample.token_ids)
    return trains


def _rl_weights(
    mask: Sequence[bool], advantages: Sequence[float], weights: Sequence[float] | None
) -> tuple[list[float] | None, bool]:
    """Weights to write out, and whether a token has one. A whole group usually has no weights of its
    own and one advantage per episode: those cases take no step per token in Python."""
    if weights is None:
        if not any(itertools.compress(advantages, mask)):
            return [0.0] * len(mask), False
        if all(itertools.compress(advantages, mask)):
            return None, True
        weights = [1.0] * len(mask)
    live = [
        weight if trainable and advantage else 0.0
        for weight, trainable, advantage in zip(weights, mask, advantages, strict=True)
    ]
    return (None if live == mask else live), any(live)


def _stream(values: Sequence[float] | None) -> list[float] | None:
    return None if values is None else list(values)


def _annotation(sample: TrainingSample) -> Annotation:
    advantages = sample.advantages or [0.0] * len(sample.mask)
    return Annotation(sample.trace_id, sample.branch_index, advantages, sample.mask)
