"""The tasks of one source: loaded once, selected, as data that can be sent to an env server."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prime_rl.configs.orchestrator import SelectConfig, SourceConfig
from prime_rl.errors import ConfigError

LOCAL_RUNTIME = {"type": "subprocess"}
"""Where programs run unless the recipe says otherwise: the library's own default is a hosted box."""


@dataclass(frozen=True)
class TaskRow:
    """One task."""

    key: str
    """Stable identity."""
    data: dict[str, Any]
    """What the env server rebuilds the task from."""


def environment_settings(source: SourceConfig) -> dict[str, Any]:
    """The `env` table of a source with the runtime filled in."""
    settings = dict(source.env)
    agent = dict(settings.get("agent") or {})
    agent.setdefault("runtime", LOCAL_RUNTIME)
    settings["agent"] = agent
    return settings


def select(count: int, config: SelectConfig) -> list[int]:
    """Indices of the tasks to use out of `count`. Raises ConfigError when none is left."""
    wrong = [index for index in config.include or () if not 0 <= index < count]
    if wrong:
        raise ConfigError(f"select.include: there is no task {wrong[0]}; the source has {count}")
    chosen = list(range(count)) if config.include is None else list(config.include)
    excluded = set(config.exclude)
    chosen = [index for index in chosen if index not in excluded]
    if config.shuffle is not None:
        random.Random(config.shuffle).shuffle(chosen)
    chosen = chosen[config.skip :]
    if config.limit is not None:
        chosen = chosen[: config.limit]
    if not chosen:
        raise ConfigError(f"select leaves none of the {count} tasks of the source")
    return chosen


def load_tasks(source: SourceConfig) -> list[TaskRow]:
    """Load the source's task set and select from it. Raises ConfigError naming the source."""
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    try:
        config = resolve_env_config(environment_settings(source))
        tasks = list(load_taskset(config.taskset))
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            f"source {source.label!r}: the environment cannot be loaded: {error}"
        ) from error
    try:
        chosen = select(len(tasks), source.select)
    except ConfigError as error:
        raise ConfigError(f"source {source.label!r}: {error}") from error
    return _rows(tasks, chosen)


def _rows(tasks: Sequence[Any], chosen: Sequence[int]) -> list[TaskRow]:
    return [
        TaskRow(str(tasks[index].key), tasks[index].data.model_dump(mode="json"))
        for index in chosen
    ]
