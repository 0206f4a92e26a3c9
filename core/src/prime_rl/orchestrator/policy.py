"""Where the run stands: policy versions, steps, what was used up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Policy:
    """The weights that generate."""

    version: int
    """Version the engines run; stamped on every episode at dispatch."""
    published: int
    """Newest version the trainer has completed; opens the gate of the next batch."""
    model: str = ""
    """Name under which the engines serve it."""


@dataclass
class Progress:
    """Counters of the run."""

    step: int = 1
    """Step whose batch is being filled."""
    total_tokens: int = 0
    """Tokens of all batches."""
    total_samples: int = 0
    """Samples of all batches."""
    total_episodes: int = 0
    """Episodes of all batches."""


def staleness(step: int, version: int) -> int:
    """Versions between the policy that an episode was dispatched with and the one step `step`
    updates."""
    return step - 1 - version


def fillable_batches(step: int, version: int, target_lag: int, max_steps: int) -> int:
    """How many batches, from `step` on, may be filled by episodes of `version` or newer. At most 0:
    the dispatch gate is closed."""
    return min(version + 1 + target_lag, max_steps) - step + 1


def gate_is_open(step: int, version: int, target_lag: int) -> bool:
    """Batch `step` may ship: version step - 1 - target_lag has been published."""
    return staleness(step, version) <= target_lag
