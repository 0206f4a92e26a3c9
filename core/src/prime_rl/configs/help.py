"""The text of `prime run --help`: every field with type, default and meaning, plugins' included."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from prime_rl.configs.fields import FieldType, PluginClass, field_type_of
from prime_rl.configs.registry import PluginRegistry
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.configs.validate import Lookup

WIDTH = 100
_MODEL_OPTIONS = "model.options"
_HIDDEN = ("plugin_versions", "stages")

FORMS = """\
How keys are set on the command line (the command line wins over files, later files over earlier):
  --section.key VALUE       dashes and underscores are the same; None is null
  --flag, --no-flag         a boolean; the last one counts
  --section                 switches an optional section on, with its defaults
  --section @ FILE          lays a TOML file over one section
  --list.0.key VALUE        a key of a list's item; items count from 0
  --table '{"a": 1}'        JSON, for plain tables and lists
  --resume [STEP]           after STEP, or after the newest complete checkpoint; --resume.dir DIR
                            starts from another run's checkpoint
In a file, `None` is null too, and an empty [section] switches it on."""


def field_help(run: RunConfig | None, registry: PluginRegistry) -> str:
    """Every key of a run. Open sections show the plugins that `run` chose, else the default ones.

    A plugin that cannot be had is said to be so in its place.
    """
    lookup = Lookup(registry)
    names: dict[str, str] = {}
    for stage in run.stages if run is not None else []:
        names.update(_chosen_types(stage, ""))
        if stage.model.plugin is not None:
            names[_MODEL_OPTIONS] = stage.model.plugin
    writer = _Writer(lookup.quiet, registry, names)
    writer.section(RunConfig, "")
    stages: list[tuple[str, type[BaseModel]]] = [("rl", RLConfig), ("sft", SFTConfig)]
    seen: set[str] = set()
    for name, stage_class in stages:
        writer.heading(f"Keys of a stage of type {name!r}" + (" beside those above" * bool(seen)))
        writer.section(stage_class, "", seen)
        seen |= set(stage_class.model_fields)
    return "\n".join([FORMS, "", *writer.lines])


def _chosen_types(section: BaseModel, path: str) -> Iterator[tuple[str, str]]:
    """(path of a section with variants or a plugin, its type)."""
    for name, info in type(section).model_fields.items():
        value = getattr(section, name)
        here = f"{path}.{name}" if path else name
        if isinstance(value, BaseModel):
            kind = field_type_of(info)
            if kind.plugin is not None or kind.variants:
                yield here, str(value.type)  # type: ignore[attr-defined]
            yield from _chosen_types(value, here)


class _Writer:
    def __init__(
        self, plugin_class: PluginClass, registry: PluginRegistry, names: dict[str, str]
    ) -> None:
        self.lines: list[str] = []
        self._plugin_class = plugin_class
        self._registry = registry
        self._names = names

    def heading(self, text: str) -> None:
        """A line over a group of sections."""
        self.lines += ["", text, "=" * len(text)]

    def section(self, section: type[BaseModel], path: str, without: set[str] | None = None) -> None:
        """The scalar keys of a section, then its inner sections."""
        inner: list[tuple[str, FieldInfo, FieldType]] = []
        for name, info in section.model_fields.items():
            if name in _HIDDEN and section is RunConfig or name in (without or ()):
                continue
            here = f"{path}.{name}" if path else name
            kind = field_type_of(info)
            if kind.is_section or (kind.item is not None and kind.item.is_section):
                inner.append((here, info, kind))
            else:
                self._key(here, info, kind)
        for here, info, kind in inner:
            self._inner(here, info, kind)

    def _key(self, path: str, info: FieldInfo, kind: FieldType) -> None:
        default = "required" if info.is_required() else f"default {_default(info)}"
        self.lines.append(f"  --{path.replace('_', '-')}  ({kind.describe()}; {default})")
        self._text(info.description)
        if path == _MODEL_OPTIONS and path in self._names:
            config = self._plugin_class("model", self._names[path])
            if config is not None:
                self.section(config, path, {"type"})

    def _inner(self, path: str, info: FieldInfo, kind: FieldType) -> None:
        is_list = kind.item is not None
        inside = kind.item if kind.item is not None else kind
        below = f"{path}.N" if is_list else path
        notes = [" one per item, N from 0"] if is_list else []
        notes += [" off unless switched on"] if _is_off(info) else []
        chosen: str | None = None
        if inside.plugin is not None or inside.variants:
            chosen = self._names.get(path) or (
                inside.plugin.default if inside.plugin is not None else inside.default_variant
            )
            known = (
                self._registry.names(inside.plugin.kind)
                if inside.plugin is not None
                else list(inside.variants)
            )
            notes.append(f" type: {' | '.join(known) or 'none installed'}; keys of {chosen!r}")
        self.lines += ["", f"[{below}]{';'.join(notes)}"]
        self._text(info.description, "  ")
        section = inside.section_class({"type": chosen} if chosen else None, self._plugin_class)
        if section is None:
            self.lines.append(f"  ({chosen} is not installed or cannot be used)")
        else:
            self.section(section, below, {"type"} if chosen else None)

    def _text(self, text: str | None, indent: str = "      ") -> None:
        if text:
            words = " ".join(text.split())
            self.lines += textwrap.wrap(
                words, WIDTH, initial_indent=indent, subsequent_indent=indent
            )


def _is_off(info: FieldInfo) -> bool:
    return info.default is None


def _default(info: FieldInfo) -> str:
    value = info.default
    if value is PydanticUndefined and info.default_factory is not None:
        return "{}"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, (Path, str)) else repr(value)
