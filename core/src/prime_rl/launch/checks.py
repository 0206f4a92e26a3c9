"""Everything that can be known to be wrong before a process starts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

from prime_rl.configs.paths import stage_name
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.errors import ConfigError, what_was_raised
from prime_rl.launch.capabilities import check
from prime_rl.plugins import Registry


def check_run(run: RunConfig, registry: Registry) -> None:
    """Raise ConfigError or PluginError for what would fail later. Starts and writes nothing."""
    for index, stage in enumerate(run.stages):
        where = f"stage {stage_name(run, index)}"
        _check_model_directory(stage, index, where)
        check(run, index, registry, stage.trainer.device)
        if isinstance(stage, SFTConfig):
            _check_data(stage, where)


def _check_model_directory(stage: SFTConfig | RLConfig, index: int, where: str) -> None:
    if stage.model.name is None:
        return
    config_file = Path(stage.model.name) / "config.json"
    if not config_file.is_file():
        raise ConfigError(
            f"{where}: model.name is {stage.model.name!r}, but {config_file} does not exist; expected "
            "the directory of a Hugging Face checkpoint"
        )
    try:
        json.loads(config_file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{where}: {config_file} is not JSON: {error}") from error


def _check_data(stage: SFTConfig, where: str) -> None:
    source = stage.data.source
    if source.endswith(".jsonl"):
        if not Path(source).is_file():
            raise ConfigError(f"{where}: data.source {source!r} does not exist")
        return
    module_name, colon, function = source.partition(":")
    if not colon:
        raise ConfigError(
            f"{where}: data.source {source!r}: expected a .jsonl file or `module:function`"
        )
    try:
        found = getattr(importlib.import_module(module_name), function)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"{where}: data.source {source!r} cannot be loaded: {what_was_raised(error)}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{where}: data.source {source!r} is not a function")
