"""The tasks of one source, as data that can be sent to its env server.

The env server's process loads and selects them (it has the environment's library at hand anyway) and
leaves them in a file beside its address, where the orchestrator reads them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from prime_rl.configs.orchestrator import SelectConfig, SourceConfig
from prime_rl.errors import ConfigError, what_was_raised

if TYPE_CHECKING:
    from pydantic import ValidationError

LOCAL_RUNTIME = {"type": "subprocess"}
"""Where programs run unless the recipe says otherwise: the library's own default is a hosted box."""


class TaskRow(msgspec.Struct, frozen=True):
    """One task."""

    key: str
    """Stable identity."""
    data: dict[str, Any]
    """What the env server rebuilds the task from."""


def environment_settings(source: SourceConfig) -> dict[str, Any]:
    """The `env` table of a source with the runtime of every agent filled in."""
    settings = dict(source.env)
    for name in _agents_without_runtime(settings):
        settings[name] = {"runtime": LOCAL_RUNTIME, **(settings.get(name) or {})}
    return settings


def _agents_without_runtime(settings: Mapping[str, Any]) -> list[str]:
    """The agents of the environment that `settings` name, but for those whose author chose where
    their programs run."""
    from verifiers.v1.configs.agent import AgentConfig
    from verifiers.v1.utils.loaders import env_config_type

    taskset = settings.get("taskset") or {}
    fields = env_config_type(taskset.get("id", ""), settings.get("id", "")).model_fields
    return [
        name
        for name, field in fields.items()
        if isinstance(field.default, AgentConfig)
        and "runtime" not in field.default.model_fields_set
    ]


def agent_names(source: SourceConfig) -> list[str]:
    """The agents that play in the environment of a source whose tasks `load_tasks` has loaded."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import resolve_env_config

    return list(agent_config_fields(resolve_env_config(environment_settings(source))))


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
    from pydantic import ValidationError
    from verifiers.v1.utils.loaders import load_taskset, resolve_env_config

    try:
        config = resolve_env_config(environment_settings(source))
        tasks = list(load_taskset(config.taskset))
    except ValidationError as error:
        raise ConfigError(f"source {source.label!r}: {_refused_settings(error)}") from error
    except Exception as error:  # the environment's own code may raise anything
        raise ConfigError(
            f"source {source.label!r}: the environment cannot be loaded: {what_was_raised(error)}"
        ) from error
    if not tasks:
        raise ConfigError(f"source {source.label!r}: its task set has no tasks; look at `env`")
    try:
        chosen = select(len(tasks), source.select)
    except ConfigError as error:
        raise ConfigError(f"source {source.label!r}: {error}") from error
    return _rows(tasks, chosen)


def _refused_settings(error: ValidationError) -> str:
    """The keys of `env` that the environment refuses, and why."""
    problems = [
        f"env.{'.'.join(map(str, found['loc']))}: {found['msg']} (found {found['input']!r:.60})"
        for found in error.errors(include_url=False)
    ]
    return "the environment refuses its settings: " + "; ".join(problems)


def _rows(tasks: Sequence[Any], chosen: Sequence[int]) -> list[TaskRow]:
    return [
        TaskRow(str(tasks[index].key), tasks[index].data.model_dump(mode="json"))
        for index in chosen
    ]


def tasks_file(address_file: Path) -> Path:
    """Where the tasks of a source lie, given the file of its env server's address."""
    return address_file.with_suffix(".tasks")


def write_tasks(path: Path, tasks: Sequence[TaskRow]) -> None:
    """Leave the tasks for the orchestrator; before the address is published."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(msgspec.msgpack.encode(tasks))


def read_tasks(path: Path) -> list[TaskRow]:
    """What `write_tasks` wrote."""
    return msgspec.msgpack.decode(path.read_bytes(), type=list[TaskRow])
