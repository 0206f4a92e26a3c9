"""Gives the tokens of a batch the log-probabilities that a reference model has for them."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from prime_rl.api.algorithm import Algorithm
from prime_rl.errors import RunError
from prime_rl.orchestrator.columns import SampleColumns
from prime_rl.orchestrator.frozen import check_scores, frozen_scorer
from prime_rl.orchestrator.group import ScoredEpisode
from prime_rl.orchestrator.scorer import ScoringFailed, TokenScorer
from prime_rl.orchestrator.services import Services

log = logging.getLogger(__name__)

REFERENCE_WEIGHTS = "ref_kl_weights"


@dataclass(frozen=True)
class Endpoint:
    """Who scores the samples of a source."""

    scorer: TokenScorer
    finished: Callable[[Sequence[str]], None] = lambda sessions: None
    """Releases the sessions of requests."""


class References:
    """Scores batches when they ship. An episode whose scoring fails is never trained on."""

    def __init__(self, endpoints: Mapping[str, Endpoint], most_failures: int) -> None:
        self._endpoints = endpoints
        self._most_failures = most_failures
        self._failures = 0
        """Episodes that failed since the last that did not."""
        self.scored_tokens = 0
        self.failed_episodes = 0

    async def score(
        self, episodes: Sequence[ScoredEpisode]
    ) -> tuple[list[ScoredEpisode], list[ScoredEpisode]]:
        """(episodes with every stream they need, episodes that failed), both in the given order.

        Raises RunError after `most_failures` failures without a success.
        """
        outcomes = await asyncio.gather(*map(self._episode, episodes))
        done = [outcome for outcome in outcomes if isinstance(outcome, ScoredEpisode)]
        pairs = zip(episodes, outcomes, strict=True)
        failed = [(e, outcome) for e, outcome in pairs if isinstance(outcome, ScoringFailed)]
        if failed:
            self.failed_episodes += len(failed)
            reason = failed[-1][1]
            log.warning("%d episodes were not scored and are dropped: %s", len(failed), reason)
            self._failures = len(failed) + (0 if done else self._failures)
            if self._failures >= self._most_failures:
                raise RunError(
                    f"the reference scored none of the last {self._failures} episodes; the last "
                    f"time: {reason}"
                )
        else:
            self._failures = 0
        return done, [episode for episode, _ in failed]

    async def _episode(self, episode: ScoredEpisode) -> ScoredEpisode | ScoringFailed:
        endpoint = self._endpoints.get(episode.figures.source)
        if endpoint is None or not any(map(needs_reference, episode.samples)):
            return episode
        try:
            samples = [await self._sample(sample, endpoint) for sample in episode.samples]
        except ScoringFailed as error:
            return error
        return dataclasses.replace(episode, samples=samples)

    async def _sample(self, sample: SampleColumns, endpoint: Endpoint) -> SampleColumns:
        if not needs_reference(sample):
            return sample
        view = sample.reference_view
        context, replaced = (view.token_ids, view.replaced) if view else ((), 0)
        tokens = sample.values("token_ids").tolist()
        end = scored_end(sample)
        session = f"{sample.trace_id}-reference"
        try:
            scores = await endpoint.scorer.score([*context, *tokens[replaced:end]], session)
        finally:
            endpoint.finished([session])
        self.scored_tokens += end
        own = scores[len(context) :]
        after = [0.0] * (len(tokens) - end)
        return sample.with_stream("ref_logprobs", [0.0] * replaced + own + after)


async def open_references(
    algorithms: Mapping[str, Algorithm],
    names: Mapping[str, str],
    services: Services,
    stack: AsyncExitStack,
    most_failures: int,
) -> References | None:
    """Scorers of the sources whose algorithms ask for a reference; None when none does. `names` are
    those that `find_teachers` found. Raises RunError when a teacher does not score."""
    endpoints: dict[str, Endpoint] = {}
    for label, algorithm in algorithms.items():
        wanted = algorithm.requirements.reference
        if wanted == "teacher":
            assert algorithm.teacher is not None
            scorer = frozen_scorer(algorithm.teacher, names[label])
            stack.push_async_callback(scorer.close)
            await check_scores(scorer, label)
            endpoints[label] = Endpoint(scorer)
        elif wanted == "policy":
            scorer = TokenScorer(services.router_url, services.model)
            stack.push_async_callback(scorer.close)
            endpoints[label] = Endpoint(scorer, services.release_sessions)
    return References(endpoints, most_failures) if endpoints else None


def needs_reference(sample: SampleColumns) -> bool:
    """Some token has a ref_kl weight."""
    return REFERENCE_WEIGHTS in sample.streams and any(sample.values(REFERENCE_WEIGHTS))


def scored_end(sample: SampleColumns) -> int:
    """One past the last token that trains; what follows needs no score."""
    weights = sample.values(REFERENCE_WEIGHTS)
    trains = zip(weights, sample.values("mask"), strict=True)
    return 1 + max(place for place, (weight, mask) in enumerate(trains) if weight or mask)
