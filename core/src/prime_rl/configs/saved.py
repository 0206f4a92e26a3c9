"""Writes a resolved run to JSON and reads it back, every field kept."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from prime_rl.configs.base import ValidationContext
from prime_rl.configs.problems import error_from, problems_of
from prime_rl.configs.registry import PluginRegistry
from prime_rl.configs.run import RunConfig
from prime_rl.configs.tree import nodes_from
from prime_rl.configs.validate import Lookup
from prime_rl.errors import ConfigError

Found = TypeVar("Found", bound=PluginRegistry)


def save_resolved(run: RunConfig, path: Path) -> None:
    """Write the run, nulls and all fields of plugins kept; the file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(run.model_dump_json(indent=2) + "\n")
    temporary.rename(path)


def load_resolved(path: Path, registry: PluginRegistry) -> RunConfig:
    """The run that `save_resolved` wrote, equal to the one it was given.

    Raises ConfigError.
    """
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a resolved run: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path}: expected a JSON object, found {type(document).__name__}")
    lookup = Lookup(under_switches(document, registry))
    try:
        return RunConfig.model_validate(document, context=ValidationContext(lookup))
    except ValidationError as error:
        root = nodes_from(document, str(path), {})
        raise error_from(problems_of(error, root, lookup.known)) from error


def under_switches(document: object, registry: Found, no_plugins: Sequence[str] = ()) -> Found:
    """The registry under the `[plugins]` of a run's stages (plain values) and `--no-plugin`."""
    allow: list[str] | None = None
    lists: dict[str, list[str]] = {"deny": [], "required": []}
    stages = document.get("stages") if isinstance(document, dict) else None
    for stage in stages if isinstance(stages, list) else []:
        switches = stage.get("plugins") if isinstance(stage, dict) else None
        if not isinstance(switches, dict):
            continue
        if switches.get("allow") is not None:
            allow = [*(allow or []), *_names(switches["allow"])]
        for key, names in lists.items():
            names += _names(switches.get(key))
    if allow is None and not any(lists.values()) and not no_plugins:
        return registry
    return registry.with_switches(
        allow=None if allow is None else tuple(dict.fromkeys(allow)),
        deny=tuple(dict.fromkeys(lists["deny"])),
        required=tuple(dict.fromkeys(lists["required"])),
        no_plugin=tuple(no_plugins),
    )


def _names(value: object) -> list[str]:
    """The strings of a list; validation refuses anything else later."""
    return [name for name in value if isinstance(name, str)] if isinstance(value, list) else []
