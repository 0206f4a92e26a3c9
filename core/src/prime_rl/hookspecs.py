"""What core tells every listener (pluggy, group `prime_rl.hooks`). Results are ignored.

A listener takes as few of the arguments as it likes; one that raises is logged and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pluggy

hookspec = pluggy.HookspecMarker("prime_rl")


@hookspec
def resolved_config(config: Mapping[str, Any], run_dir: Path) -> None:
    """The whole configuration of a run, as saved, before any process starts."""


@hookspec
def run_started(run_dir: Path, role: str) -> None:
    """A process of the run (`launcher`, `trainer`, `orchestrator`) is ready to work."""


@hookspec
def run_finished(run_dir: Path, role: str, exit_code: int) -> None:
    """That process has ended its work; 0 means success."""


@hookspec
def step_metrics(step: int, metrics: Mapping[str, float], role: str) -> None:
    """Metrics of one finished step, counted from 1. Called on rank 0 only."""


@hookspec
def trace_event(event: str, episode_id: str, fields: Mapping[str, Any]) -> None:
    """Something about an episode was written to the trace stream (`episode`: it is over)."""


@hookspec
def weight_update(version: int, seconds: float, role: str) -> None:
    """Weights of `version` were published (trainer) or taken over (engine)."""
