"""Applies the overrides of the command line to a draft, each value typed by its field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from prime_rl.configs.arguments import BOOLEAN_WORDS, Override, snake
from prime_rl.configs.compose import Draft, for_stage, overlay, stage_type
from prime_rl.configs.fields import FieldType, PluginClass, child_type
from prime_rl.configs.problems import Problem
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.configs.toml import read_toml
from prime_rl.configs.tree import COMMAND_LINE, Node, Origin, Path, merge
from prime_rl.errors import ConfigError

_RUN_FIELDS = ("run", "output_dir")
_STAGE_TYPES = {"rl": FieldType(section=RLConfig), "sft": FieldType(section=SFTConfig)}
_LARGEST_INDEX = 100_000
"""An index beyond this is refused before anything is built."""


class BadValue(ValueError):
    """A text that the field's type cannot be read from; the message says what was expected."""


def apply_overrides(
    draft: Draft, overrides: list[Override], plugin_class: PluginClass
) -> list[Problem]:
    """Lay each override over the draft, in order; returns what could not be applied.

    Those that choose a `type` go first: they decide what the other keys mean.
    """
    problems = []
    ordered = sorted(overrides, key=lambda one: snake(one.parts[-1]) != "type")
    for override in ordered:
        try:
            _apply(draft, override, plugin_class)
        except BadValue as error:
            problems.append(Problem(Origin(COMMAND_LINE, None, ()), override.spelled, str(error)))
        except ConfigError as error:
            problems.append(Problem(Origin(COMMAND_LINE, None, ()), override.spelled, str(error)))
    return problems


def _apply(draft: Draft, override: Override, plugin_class: PluginClass) -> None:
    override = replace(override, parts=_negated_last(override.parts))
    builder = _Builder(override, plugin_class)
    first = snake(override.parts[0])
    if first in _RUN_FIELDS:
        run_type = FieldType(section=RunConfig)
        draft.run = merge(draft.run, builder.table(draft.run, run_type, override.parts))
        return
    targets, parts, shared = _targets(draft, override)
    if not targets:
        layer = builder.table(None, FieldType(), override.parts)
        draft.run = merge(draft.run, layer)
        return
    for index in targets:
        stage = draft.stages[index]
        kind = _STAGE_TYPES.get(stage_type(stage) or "", FieldType())
        layer = builder.table(stage, kind, parts)
        draft.stages[index] = overlay(stage, for_stage(index, layer) if shared else layer)


def _negated_last(parts: tuple[str, ...]) -> tuple[str, ...]:
    """`--no-a.b` as `--a.no-b`."""
    if len(parts) > 1 and parts[0].startswith(("no-", "no_")):
        return (parts[0][3:], *parts[1:-1], f"no_{parts[-1]}")
    return parts


def _targets(draft: Draft, override: Override) -> tuple[list[int], tuple[str, ...], bool]:
    """(numbers of the stages meant, path inside a stage, whether it was said for all of them)."""
    parts = override.parts
    first = snake(parts[0])
    if first == "stages":
        return [_stage_number(draft, override)], parts[2:], False
    if draft.is_staged and first in ("type", "name"):
        raise BadValue(f"this run has several stages; write --stages.0.{first}")
    having = [i for i in draft.stages_with(first) if draft.stages[i].is_table]
    if not having and len(parts) == 1 and first.startswith("no_"):
        having = [i for i in draft.stages_with(first[3:]) if draft.stages[i].is_table]
    if having:
        return having, parts, True
    named = [i for i, stage in enumerate(draft.stages) if first in _names(stage)]
    if not named:
        return [], parts, False
    if len(parts) == 1:
        raise BadValue(f"names a stage; write {override.spelled}.section.key value")
    return named, parts[1:], False


def _names(stage: Node) -> set[str]:
    written = stage.get("name")
    own = snake(written.value) if written and isinstance(written.value, str) else None
    return {name for name in (own, stage_type(stage)) if name and stage.is_table}


def _stage_number(draft: Draft, override: Override) -> int:
    parts = override.parts
    if len(parts) < 3 or not parts[1].isdecimal():
        raise BadValue("write --stages.N.section.key value, N from 0")
    number = _index(parts[1])
    if number >= len(draft.stages) or not draft.stages[number].is_table:
        raise BadValue(f"there is no stage {number}; this run has {len(draft.stages)}, from 0")
    return number


def _index(text: str) -> int:
    if len(text) > 6 or int(text) > _LARGEST_INDEX:
        raise BadValue(f"{text} is no sensible list index")
    return int(text)


class _Builder:
    """Makes the table that one override stands for."""

    def __init__(self, override: Override, plugin_class: PluginClass) -> None:
        self._override = override
        self._plugin_class = plugin_class

    def table(self, base: Node | None, kind: FieldType, parts: tuple[str, ...]) -> Node:
        """The override as a table to lay over `base`, a value of type `kind`.

        `parts` is the rest of the path; unknown keys are kept for validation to refuse.
        """
        return self._at(base, kind, parts, ())

    def _at(self, base: Node | None, kind: FieldType, parts: tuple[str, ...], done: Path) -> Node:
        if not parts:
            return self._value(kind, done)
        raw = base.plain() if base is not None else None
        key = self._key(kind, raw, parts[0])
        child = child_type(kind, raw, key, self._plugin_class)
        rest = parts[1:]
        if key == "type" and kind.is_section:
            child = FieldType(scalars=frozenset({str}))  # it may name another variant
        if child is None and (switch := self._switched_off(kind, raw, parts, done)) is not None:
            return switch
        if kind.item is not None and child is not None:
            return self._item(base, child, _index(key), rest, done)
        inner_base = base.get(key) if base is not None and base.is_table else None
        inner = self._at(inner_base, child or FieldType(), rest, (*done, key))
        return self._wrap(key, inner, done)

    def _item(
        self, base: Node | None, child: FieldType, index: int, rest: tuple[str, ...], done: Path
    ) -> Node:
        """An item of a list as a table with its number, or the list's start."""
        length = len(base.value) if base is not None and base.is_list else 0
        if index > length:
            raise BadValue(f"index {index} is past the end of a list of {length}")
        old = base.get(index) if base is not None else None
        inner = self._at(old, child, rest, (*done, index))
        if length == 0:
            return Node([inner], Origin(COMMAND_LINE, None, done))
        return self._wrap(str(index), inner, done)

    def _wrap(self, key: str, inner: Node, done: Path) -> Node:
        return Node({key: inner}, Origin(COMMAND_LINE, None, done))

    def _key(self, kind: FieldType, raw: Any, part: str) -> str:
        """Key of a section in snake case; key of a plain table as it stands there already."""
        if kind.values is not None or kind.is_any:
            existing = raw if isinstance(raw, dict) else {}
            is_free = kind.is_any or (kind.values is not None and kind.values.is_any)
            return snake(part) if part not in existing and is_free else part
        return snake(part)

    def _switched_off(
        self, kind: FieldType, raw: Any, parts: tuple[str, ...], done: Path
    ) -> Node | None:
        """`no-flag` as the last part of a path, when `flag` is a boolean here."""
        if len(parts) != 1:
            return None
        key = snake(parts[0])
        if not key.startswith("no_") or self._override.text is not None:
            return None
        child = child_type(kind, raw, key[3:], self._plugin_class)
        if child is None or not child.is_switch:
            return None
        return self._wrap(key[3:], self._scalar(False, (*done, key[3:])), done)

    def _value(self, kind: FieldType, done: Path) -> Node:
        override = self._override
        if override.file is not None:
            if not (kind.is_section or kind.values or kind.is_any or kind == FieldType()):
                raise BadValue(f"`@ file` fits a section; this is {kind.describe()}")
            return _moved(read_toml(override.file), done)
        if override.text is not None:
            return self._from_plain(read_value(override.text, kind), done)
        if kind.is_switch:
            return self._scalar(True, done)
        if kind.is_section or kind.values is not None:
            return Node({}, Origin(COMMAND_LINE, None, done))
        if kind.is_any or kind == FieldType():
            return self._scalar(True, done)
        raise BadValue(f"needs a value: {kind.describe()}")

    def _scalar(self, value: Any, done: Path) -> Node:
        return Node(value, Origin(COMMAND_LINE, None, done))

    def _from_plain(self, value: Any, path: Path) -> Node:
        origin = Origin(COMMAND_LINE, None, path)
        if isinstance(value, dict):
            return Node({k: self._from_plain(v, (*path, k)) for k, v in value.items()}, origin)
        if isinstance(value, list):
            items = [self._from_plain(v, (*path, i)) for i, v in enumerate(value)]
            return Node(items, origin)
        return Node(value, origin)


def _moved(node: Node, prefix: Path) -> Node:
    """The node with its written path below `prefix`."""
    origin = node.origin._replace(path=(*prefix, *node.origin.path))
    if node.is_table:
        return Node({key: _moved(one, prefix) for key, one in node.value.items()}, origin)
    if node.is_list:
        return Node([_moved(one, prefix) for one in node.value], origin)
    return Node(node.value, origin)


def read_value(text: str, kind: FieldType) -> Any:
    """The value that a word of the command line stands for where `kind` is expected.

    Raises BadValue. A place that no class knows takes the word as JSON or as a string.
    """
    if text == "None":
        return None
    if kind.plugin is not None:
        if text.startswith("{"):
            raise BadValue("JSON fits plain tables only; set the keys of a section one by one")
        return {"type": text}
    if kind.is_section:
        raise BadValue(f"found {text!r}, but this is a section; set its keys one by one")
    if kind.item is not None or kind.values is not None:
        return _read_json(text, kind)
    if kind.is_any or kind == FieldType():
        return _read_anything(text)
    return _read_scalar(text, kind)


def _read_json(text: str, kind: FieldType) -> Any:
    if kind.item is not None and kind.item.is_section:
        raise BadValue("a list of sections; set its items by number: --list.0.key value")
    wanted: type = list if kind.item is not None else dict
    name = "list" if kind.item is not None else "object"
    value = _loads(text)
    if not isinstance(value, wanted):
        raise BadValue(f"found {text!r}, expected a JSON {name}")
    return value


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return _NOT_JSON


_NOT_JSON = object()


def _read_anything(text: str) -> Any:
    value = _loads(text)
    return text if value is _NOT_JSON else value


def _read_scalar(text: str, kind: FieldType) -> Any:
    for literal in kind.literals:
        if text == str(literal):
            return literal
    if bool in kind.scalars and text.lower() in BOOLEAN_WORDS:
        return BOOLEAN_WORDS[text.lower()]
    for number in (int, float):
        if number in kind.scalars:
            try:
                return number(text)
            except ValueError:
                continue
    if str in kind.scalars:
        return text
    raise BadValue(f"found {text!r}, expected {kind.describe()}")
