"""What the episodes of a training source must bring to be trained on, and how it is checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prime_rl.api.algorithm import AlgorithmNeeds
from prime_rl.configs.orchestrator import SamplingConfig
from prime_rl.errors import RunError
from prime_rl.orchestrator.episode import AgentTrace
from prime_rl.wire import SamplingMask, TrainingSample


@dataclass(frozen=True)
class EpisodeNeeds:
    """Of one source. The defaults ask for nothing: evaluation, and what a frozen model plays."""

    kept_tokens: str = ""
    """Why every sampled token needs its kept candidates ("top_p = 0.9"); "": it needs none."""
    routed_experts: bool = False
    """The trainer replays the experts that the engine chose."""
    reward: bool = False
    """The algorithm learns from rewards."""
    vocabulary: int | None = None
    """Token ids are below it; None: unknown."""

    @classmethod
    def of_source(
        cls,
        sampling: SamplingConfig,
        algorithm: AlgorithmNeeds,
        is_frozen: bool,
        replays_routing: bool,
        vocabulary: int | None,
    ) -> EpisodeNeeds:
        """The components rl and ref_kl compare the policy's probabilities with the engine's; only
        rl has advantages."""
        compares = not is_frozen and bool(algorithm.components & {"rl", "ref_kl"})
        return cls(
            kept_tokens=truncation(sampling) if compares else "",
            routed_experts=replays_routing and compares,
            reward="rl" in algorithm.components,
            vocabulary=vocabulary,
        )


def truncation(sampling: SamplingConfig) -> str:
    """The setting because of which some tokens cannot be sampled at all; "" when all can."""
    if sampling.top_p < 1:
        return f"top_p = {sampling.top_p:g}"
    return "" if sampling.top_k is None else f"top_k = {sampling.top_k}"


def check_samples(source: str, traces: Sequence[AgentTrace], needs: EpisodeNeeds) -> None:
    """Raises ValueError when token ids or kept candidates are damaged, RunError when the engine
    returns nothing that can be replayed: no episode of the source ever would."""
    for trace in traces:
        for place, sample in enumerate(trace.samples):
            check_token_ids(sample.token_ids, needs.vocabulary)
            if sample.sampling_mask is not None:
                check_kept(sample, sample.sampling_mask, needs.vocabulary)
            if needs.kept_tokens:
                _require_kept(source, trace, trace.paths[place], needs.kept_tokens)
            if needs.routed_experts and sample.routed_experts is None:
                _require_routes(source, trace, trace.paths[place])


def check_token_ids(token_ids: Sequence[int], vocabulary: int | None) -> None:
    """Raises ValueError for an id that no embedding has."""
    if min(token_ids) < 0 or (vocabulary is not None and max(token_ids) >= vocabulary):
        raise ValueError(
            f"token ids from {min(token_ids)} to {max(token_ids)}, expected {_expected(vocabulary)}"
        )


def check_kept(sample: TrainingSample, kept: SamplingMask, vocabulary: int | None) -> None:
    """Raises ValueError naming the position whose candidates are out of range, not distinct, or lack
    the sampled token. Positions without any are not looked at."""
    counts = np.frombuffer(kept.counts, np.int32)
    ids = np.frombuffer(kept.ids, np.int32)
    rows = np.repeat(np.arange(len(counts)), counts)

    def refuse(bad: np.ndarray, what: str) -> None:
        raise ValueError(f"kept tokens of position {rows[bad[0]]}: {what}")

    wrong = np.flatnonzero((ids < 0) | (ids >= (vocabulary or np.inf)))
    if len(wrong):
        refuse(wrong, f"found id {ids[wrong[0]]}, expected {_expected(vocabulary)}")
    order = np.lexsort((ids, rows))
    is_same = (np.diff(ids[order]) == 0) & (np.diff(rows[order]) == 0)
    if is_same.any():
        twice = order[np.flatnonzero(is_same)]
        refuse(twice, f"id {ids[twice[0]]} is there more than once")
    holds = np.zeros(len(counts), bool)
    holds[rows[ids == np.asarray(sample.token_ids)[rows]]] = True
    lacking = np.flatnonzero(~holds & (counts > 0))
    if len(lacking):
        token = sample.token_ids[lacking[0]]
        raise ValueError(
            f"kept tokens of position {lacking[0]}: the sampled token {token} is not among them"
        )


def _expected(vocabulary: int | None) -> str:
    return "ids from 0 on" if vocabulary is None else f"ids from 0 to {vocabulary - 1}"


def _require_kept(
    source: str, trace: AgentTrace, path: Sequence[Mapping[str, Any]], why: str
) -> None:
    """No candidates at one token mean that the engine kept the full vocabulary there; a message
    without any list is one that the engine did not record. Raises RunError for that."""
    if any(node.get("sampling_mask") is None and any(node["mask"]) for node in path):
        raise RunError(
            f"train source {source!r} samples with {why}, but the engine returned no kept tokens "
            f"(sampling_mask) for trace {trace.id}: it would be trained against the full "
            "vocabulary. Start the engine with --return-sampling-mask, or sample with top_p = 1 and "
            "without top_k"
        )


def _require_routes(source: str, trace: AgentTrace, path: Sequence[Mapping[str, object]]) -> None:
    """A path of which a part has routes is one whose prompt the engine held in its cache: its
    tokens route normally. Raises RunError for none at all."""
    if all(node.get("routed_experts") is None for node in path):
        raise RunError(
            f"trainer.enable_router_replay is on, but the engine returned no routed experts "
            f"(routed_experts) for trace {trace.id} of train source {source!r}: there is nothing to "
            "replay. Start the engine with --return-routed-experts, or turn "
            "trainer.enable_router_replay off"
        )
