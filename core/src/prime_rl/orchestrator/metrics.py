"""Figures of a step: what finished, what shipped, how old it was, where time went."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Sequence

from prime_rl.orchestrator.group import EpisodeFigures
from prime_rl.orchestrator.sink import Batch, Observed

log = logging.getLogger(__name__)

STATISTICS: dict[str, Callable[[EpisodeFigures], float]] = {
    "reward": lambda episode: episode.reward,
    "length": lambda episode: episode.output_tokens,
    "input_length": lambda episode: episode.input_tokens,
    "turns": lambda episode: episode.turns,
    "duration_s": lambda episode: episode.duration_s,
}
FRACTIONS: dict[str, Callable[[EpisodeFigures], bool]] = {
    "errors": lambda episode: episode.outcome == "error",
    "timeouts": lambda episode: episode.outcome == "timeout",
    "truncated": lambda episode: episode.outcome == "truncated",
    "forked": lambda episode: episode.forks > 0,
}


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    """Mean, extremes and deciles; nothing for no values."""
    if not values:
        return {}
    ordered = sorted(values)

    def quantile(share: float) -> float:
        place = share * (len(ordered) - 1)
        low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
        return low + (high - low) * (place - math.floor(place))

    return {
        f"{name}/mean": math.fsum(ordered) / len(ordered),
        f"{name}/max": ordered[-1],
        f"{name}/min": ordered[0],
        f"{name}/p10": quantile(0.1),
        f"{name}/p90": quantile(0.9),
    }


def episode_metrics(prefix: str, episodes: Sequence[EpisodeFigures]) -> dict[str, float]:
    """Statistics of episodes, and the means of the environments' own metrics over those that have
    them. Rewards are those of scored episodes: a failed one has none."""
    found: dict[str, float] = {}
    scored = [episode for episode in episodes if episode.outcome not in ("error", "timeout")]
    for name, read in STATISTICS.items():
        found |= spread(f"{prefix}/{name}", [read(episode) for episode in scored])
    names = sorted({name for episode in scored for name in episode.metrics} - set(STATISTICS))
    for name in names:
        own = [episode.metrics[name] for episode in scored if name in episode.metrics]
        found[f"{prefix}/{name}/mean"] = math.fsum(own) / len(own)
    if episodes:
        for name, holds in FRACTIONS.items():
            found[f"{prefix}/{name}/mean"] = sum(map(holds, episodes)) / len(episodes)
    return found


def batch_metrics(batch: Batch, step: int) -> dict[str, float]:
    """Everything about the episodes of a step, over all sources and per source."""
    observed = batch.observed.episodes
    shipped = [episode.figures for episode in batch.episodes]
    sources = sorted({episode.source for episode in observed + shipped})
    found = episode_metrics("train/agg/all", observed)
    found |= episode_metrics("train/agg/effective", shipped)
    if len(sources) > 1:
        for source in sources:
            own = [episode for episode in observed if episode.source == source]
            found |= episode_metrics(f"train/{source}/all", own)
            own = [episode for episode in shipped if episode.source == source]
            found |= episode_metrics(f"train/{source}/effective", own)
    for source, count in Counter(episode.source for episode in shipped).items():
        found[f"batch/{source}"] = count
    ages = [step - 1 - episode.version for episode in shipped if not episode.is_frozen]
    if ages:
        found["off_policy/mean"] = sum(ages) / len(ages)
        found["off_policy/max"] = max(ages)
    found["off_policy/dropped"] = batch.observed.dropped_stale
    found |= waste_metrics(batch.observed)
    groups = batch.observed.groups
    if groups:
        found["train/agg/zero_variance/mean"] = batch.observed.groups_without_variance / groups
    samples = [sample for episode in batch.episodes for sample in episode.samples]
    found["batch/episodes"] = len(batch.episodes)
    found["batch/samples"] = len(samples)
    found["batch/tokens"] = sum(sample.length for sample in samples)
    return found


def waste_metrics(observed: Observed) -> dict[str, float]:
    """Sampled tokens that will not train, by reason, and per token that came back in the same time
    (a group that grew too old in the queue came back earlier).

    Of cancelled episodes that were still running only the number is known.
    """
    wasted = observed.wasted_tokens
    total = sum(wasted.values())
    found: dict[str, float] = {f"wasted/{reason}_tokens": count for reason, count in wasted.items()}
    found["wasted/tokens"] = total
    if observed.sampled_tokens:
        found["wasted/share"] = total / observed.sampled_tokens
    found |= {f"cancelled/{reason}": count for reason, count in observed.cancelled.items()}
    found |= {f"curriculum/{source}/rejected": n for source, n in observed.rejected.items() if n}
    return found


def warn_of_no_signal(step: int, observed: Observed) -> None:
    """Name the reasons a step learns nothing: everything was cut, or every reward was the same."""
    episodes = observed.episodes
    if not episodes:
        return
    truncated = sum(episode.outcome == "truncated" for episode in episodes) / len(episodes)
    zero_variance = observed.groups_without_variance / max(1, observed.groups)
    is_silent = zero_variance == 1.0 and observed.groups_with_signal == 0
    if truncated == 1.0 or is_silent:
        log.warning(
            "step %d: truncation fraction %.1f, zero-variance fraction %.1f over %d episodes; %s",
            step,
            truncated,
            zero_variance,
            len(episodes),
            "raise max_completion_tokens" if truncated == 1.0 else "every group has equal rewards",
        )


def warn_of_errors(step: int, observed: Observed) -> None:
    """One line for all failed episodes: how many, and the most frequent reason."""
    failed = sum(episode.outcome in ("error", "timeout") for episode in observed.episodes)
    if failed and observed.errors:
        [(reason, count)] = observed.errors.most_common(1)
        log.warning(
            "step %d: %d of %d episodes failed; %d times: %s",
            step,
            failed,
            len(observed.episodes),
            count,
            reason,
        )


def no_signal_reason(
    rounds: int, episodes: Sequence[EpisodeFigures], errors: Sequence[str], rejected: int = 0
) -> str:
    """Why a run without any signal ends; `rejected` groups were turned down by a gate."""
    count = len(episodes)

    def share(outcome: str) -> float:
        return sum(episode.outcome == outcome for episode in episodes) / count

    rewards = [episode.reward for episode in episodes if episode.outcome != "error"]
    mean = sum(rewards) / len(rewards) if rewards else 0.0
    text = (
        f"no training signal in {rounds} rounds ({count} episodes): "
        f"{share('error'):.0%} failed, {share('timeout'):.0%} timed out, "
        f"{share('truncated'):.0%} were cut off, mean reward {mean:.3f}"
    )
    text += f", {rejected} groups turned down by a gate" if rejected else ""
    text += "" if rejected else " without variance in any group"
    if errors:
        text += f"; last error: {errors[-1].rstrip('.')}"
    if share("error") + share("timeout") > 0.5:
        advice = "Look at that error, at the environment server's log and at the engine's"
    elif share("truncated") > 0.5:
        advice = "Raise sampling.max_completion_tokens or seq_len, or ask for shorter replies"
    elif rejected:
        advice = "Narrow the range that the source's gates reject"
    else:
        advice = "Make the tasks easier or harder, or raise group_size"
    return f"{text}. {advice} (orchestrator.max_empty_batches is the number of rounds)."
