"""What the sources of a run need from outside the recipe: tasks, their demonstrations, teachers."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Sequence

from prime_rl.api.algorithm import Algorithm, Branch
from prime_rl.configs.orchestrator import SourceConfig, TrainSourceConfig
from prime_rl.configs.paths import stage_name
from prime_rl.configs.problems import did_you_mean
from prime_rl.configs.run import RLConfig, RunConfig
from prime_rl.errors import ConfigError
from prime_rl.launch.sequence import is_finished
from prime_rl.launch.stage import stage_sources
from prime_rl.orchestrator.frozen import find_frozen_model
from prime_rl.orchestrator.tasks import TaskRow, agent_names, load_tasks
from prime_rl.plugins import Registry

TASKS_ASKED = 100
"""Tasks whose hint is made before the run."""

_ANY_BRANCH = Branch(agent="agent", token_ids=(0,), mask=(True,), reward=0.0)


def check_sources(
    run: RunConfig, registry: Registry, *, is_resumed: bool = False, dry_run: bool = False
) -> list[str]:
    """Load every task set and look for every teacher once; returns warnings. Raises ConfigError for
    what a source lacks and RunError for a teacher that does not answer; a dry run asks no teacher.

    Teachers of stages that an earlier attempt finished are not asked.
    """
    warnings: list[str] = []
    for stage in run.stages:
        tasks = {
            (split, source.label): load_tasks(source) for split, source in stage_sources(stage)
        }
        if isinstance(stage, RLConfig):
            for source, algorithm in _algorithms(stage, registry):
                _check_agents(source, algorithm)
                _check_hints(source, algorithm, tasks["train", source.label])
    for index, stage in enumerate(run.stages):
        if isinstance(stage, RLConfig) and not (is_resumed and is_finished(run, index)):
            where = f"stage {stage_name(run, index)}"
            warnings += _look_for_teachers(stage, registry, where, dry_run)
    return warnings


def _algorithms(
    stage: RLConfig, registry: Registry
) -> Iterator[tuple[TrainSourceConfig, Algorithm]]:
    for source in stage.orchestrator.train.source:
        assert source.algo is not None  # inherited from the group at the latest
        algorithm: Algorithm = registry.load("algorithm", source.algo.type)(source.algo)
        yield source, algorithm


def _check_agents(source: SourceConfig, algorithm: Algorithm) -> None:
    """Every agent that the algorithm's settings name plays in the environment."""
    if not algorithm.requirements.agents:
        return
    known = agent_names(source)
    for name in sorted(algorithm.requirements.agents):
        if name not in known:
            raise ConfigError(
                f"source {source.label!r}: algo names the agent {name!r}, but the environment has "
                f"{', '.join(known)}.{did_you_mean(name, known)} Name agents of the environment"
            )


def _check_hints(source: SourceConfig, algorithm: Algorithm, tasks: Sequence[TaskRow]) -> None:
    """The first tasks hold what the reference is to be shown."""
    if algorithm.requirements.reference == "none":
        return
    for task in tasks[:TASKS_ASKED]:
        try:
            algorithm.reference_context(_ANY_BRANCH, task.data)
        except ValueError as error:
            raise ConfigError(f"source {source.label!r}, task {task.key}: {error}") from error


def _look_for_teachers(
    stage: RLConfig, registry: Registry, where: str, dry_run: bool
) -> Iterator[str]:
    """Warnings of teachers that were not looked for. Raises RunError for one that is missing."""
    environment = {**os.environ, **stage.env_vars}
    for source, algorithm in _algorithms(stage, registry):
        teacher = algorithm.teacher
        if teacher is None:
            continue
        if dry_run:
            yield (
                f"{where}: the teacher of source {source.label!r} at {teacher.base_url} was not "
                "looked for"
            )
            continue
        asyncio.run(find_frozen_model(teacher, source.label, environment=environment))
