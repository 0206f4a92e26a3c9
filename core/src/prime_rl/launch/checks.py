"""Everything that can be known to be wrong before a process starts."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

from prime_rl.configs.paths import stage_name
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.errors import ConfigError, what_was_raised
from prime_rl.launch.capabilities import check
from prime_rl.models.choose import make_plugin
from prime_rl.plugins import Registry

UNKNOWN_VOCABULARY = 64
"""Stands for the vocabulary that a fresh model gets from its tokenizer."""


def check_run(run: RunConfig, registry: Registry, dry_run: bool = False) -> list[str]:
    """Raise ConfigError or PluginError for what would fail later; returns warnings. Starts and
    writes nothing. In a dry run, files that are not here are only warned of."""
    warnings: list[str] = []
    for index, stage in enumerate(run.stages):
        where = f"stage {stage_name(run, index)}"
        config = _read_model_config(stage, where, dry_run, warnings)
        check(run, index, registry, stage.trainer.device)
        if config is not None:
            _check_architecture(stage, config, registry, where, warnings)
        if isinstance(stage, SFTConfig):
            _check_data(stage, where, dry_run, warnings)
    return list(dict.fromkeys(warnings))


def _read_model_config(
    stage: SFTConfig | RLConfig, where: str, dry_run: bool, warnings: list[str]
) -> dict[str, Any] | None:
    """The model's config.json as far as it is known before the run."""
    if stage.model.name is None:
        if stage.model.fresh is None:  # the model of the stage before
            return None
        return {"vocab_size": UNKNOWN_VOCABULARY, **stage.model.fresh.architecture}
    config_file = Path(stage.model.name) / "config.json"
    if not config_file.is_file():
        problem = f"{where}: model.name is {stage.model.name!r}, but {config_file} does not exist"
        if dry_run:
            warnings.append(f"{problem}; the model was not checked")
            return None
        raise ConfigError(f"{problem}; expected the directory of a Hugging Face checkpoint")
    try:
        config: dict[str, Any] = json.loads(config_file.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{where}: {config_file} is not JSON: {error}") from error
    return config


def _check_architecture(
    stage: SFTConfig | RLConfig,
    config: dict[str, Any],
    registry: Registry,
    where: str,
    warnings: list[str],
) -> None:
    """Let the model plugin read the config; it complains about what it cannot build."""
    plugin = make_plugin(stage.model, config, registry)
    try:
        plugin.architecture(config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    longest = config.get("max_position_embeddings")
    if isinstance(longest, int) and stage.seq_len > longest:
        warnings.append(
            f"{where}: seq_len is {stage.seq_len}, but the model was made for {longest} positions "
            "(max_position_embeddings)"
        )


def _check_data(stage: SFTConfig, where: str, dry_run: bool, warnings: list[str]) -> None:
    source = stage.data.source
    if source.endswith(".jsonl"):
        if Path(source).is_file():
            return
        problem = f"{where}: data.source {source!r} does not exist"
        if not dry_run:
            raise ConfigError(problem)
        warnings.append(f"{problem}; the data was not checked")
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
