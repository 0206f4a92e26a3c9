"""Finds the model plugin for a checkpoint. Loads no torch, so a launcher can check a run with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prime_rl.api.model import Model
from prime_rl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from prime_rl.configs.model import ModelConfig
    from prime_rl.plugins.registry import Registry


def read_config_json(model_dir: Path) -> dict[str, Any]:
    """The config.json of a checkpoint directory. Raises CheckpointError naming what is wrong."""
    path = model_dir / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{path} does not exist; expected a Hugging Face checkpoint directory with config.json"
        ) from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, expected a table")
    return values


def plugin_name_for(model_type: str, registry: Registry) -> str:
    """Name, as a configuration writes it, of the installed plugin that serves a `model_type`.

    Raises PluginError listing what was tried.
    """
    return registry.model_for(model_type).name_in_config


def make_plugin(model: ModelConfig, config: dict[str, Any], registry: Registry) -> Model:
    """The model plugin of a run, with its options validated.

    `config` is the checkpoint's config.json. Raises ConfigError when it names no model_type and the
    run no plugin.
    """
    name = model.plugin
    if name is None:
        model_type = config.get("model_type")
        if not isinstance(model_type, str):
            raise ConfigError(
                f"config.json: model_type: found {model_type!r}, expected a string; or set "
                "model.plugin"
            )
        name = plugin_name_for(model_type, registry)
    try:
        options = registry.config_class("model", name)(**{**model.options, "type": name})
    except ValueError as error:
        raise ConfigError(f"model.options of {name}: {error}") from error
    plugin = registry.load("model", name)(options)
    assert isinstance(plugin, Model)
    return plugin
