"""Which plugins a stage chose, and where; read from the validated sections themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from pydantic import BaseModel

from prime_rl.configs.base import PluginConfig
from prime_rl.configs.fields import FieldType, field_type_of
from prime_rl.configs.run import RLConfig, SFTConfig


class Choice(NamedTuple):
    """One plugin chosen by one section."""

    kind: str
    path: str
    """Dotted path of the section, inside the stage."""
    name: str
    section: PluginConfig | None
    """The plugin's settings; None for the model, whose settings are `model.options`."""


def chosen_plugins(stage: SFTConfig | RLConfig) -> list[Choice]:
    """Every plugin that the stage's sections name, depth first."""
    choices = list(_in_section(stage, ""))
    if stage.model.plugin is not None:
        choices.append(Choice("model", "model.plugin", stage.model.plugin, None))
    return choices


def _in_section(section: BaseModel, path: str) -> Iterator[Choice]:
    for name, info in type(section).model_fields.items():
        here = f"{path}.{name}" if path else name
        yield from _in_value(getattr(section, name), field_type_of(info), here)


def _in_value(value: object, kind: FieldType, path: str) -> Iterator[Choice]:
    if isinstance(value, PluginConfig) and kind.plugin is not None:
        yield Choice(kind.plugin.kind, path, value.type, value)
    if isinstance(value, BaseModel):
        yield from _in_section(value, path)
    elif isinstance(value, (list, tuple)) and kind.item is not None:
        for index, item in enumerate(value):
            yield from _in_value(item, kind.item, f"{path}.{index}")
