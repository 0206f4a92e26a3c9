"""Turns everything that is wrong with a configuration into one message a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, NamedTuple

from pydantic import ValidationError

from prime_rl.configs import former_keys
from prime_rl.configs.base import describe_value
from prime_rl.configs.fields import FieldType, PluginClass, child_type, every_path
from prime_rl.configs.former import answers, former_of, spelled_out
from prime_rl.configs.orchestrator import all_inherited
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.configs.toml import unsuitable
from prime_rl.configs.tree import Node, Origin, Path
from prime_rl.errors import ConfigError

MOST_SHOWN = 30
"""Problems listed before the rest is only counted."""

_MESSAGE_SAYS_MORE = {"too_short", "too_long", "string_too_short", "string_too_long"}
_OWN_TEXT = {"value_error", "assertion_error", "plugin_error"}


class Problem(NamedTuple):
    """One thing that is wrong."""

    origin: Origin
    path: str
    """Dotted path as written."""
    text: str

    def describe(self) -> str:
        """`recipe.toml:12: trainer.optim.lr: found ..., expected ...`."""
        where = self.origin.describe()
        parts = [where] if where else []
        parts += [self.path] if self.path else []
        return ": ".join([*parts, self.text.replace("\n", "\n    ")])


def error_from(problems: Iterable[Problem]) -> ConfigError:
    """The error that lists the problems, each once."""
    lines = list(dict.fromkeys(problem.describe() for problem in problems))
    shown = lines[:MOST_SHOWN]
    if len(lines) > MOST_SHOWN:
        shown.append(f"... and {len(lines) - MOST_SHOWN} more")
    if len(lines) == 1:
        return ConfigError(lines[0])
    return ConfigError("\n  ".join([f"{len(lines)} problems in the configuration:", *shown]))


def dotted(path: Iterable[Any]) -> str:
    """A path as text."""
    return ".".join(map(str, path))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` Did you mean 'x'?`, or "" when nothing known is close."""
    close = difflib.get_close_matches(name.replace("-", "_"), sorted(set(known)), n=3, cutoff=0.6)
    return f" Did you mean {' or '.join(map(repr, close))}?" if close else ""


def unsuitable_values(node: Node) -> list[Problem]:
    """Scalars anywhere below that no configuration can hold: dates, infinities, huge integers."""
    if node.is_table or node.is_list:
        inner = node.value.values() if node.is_table else node.value
        return [problem for one in inner for problem in unsuitable_values(one)]
    reason = unsuitable(node.value)
    if not reason:
        return []
    text = f"found {describe_value(node.value)}, {reason}"
    return [Problem(node.origin, dotted(node.origin.path), text)]


def problems_of(error: ValidationError, root: Node, plugin_class: PluginClass) -> list[Problem]:
    """Every error of a validation of `root`, in its order."""
    translator = _Translator(root, plugin_class)
    return translator.problems(error)


def section_problems(
    error: ValidationError, root: Node, place: Path, kind: FieldType, plugin_class: PluginClass
) -> list[Problem]:
    """Every error of a validation of the part of `root` at `place`, a section of type `kind`."""
    translator = _Translator(root, plugin_class, place, kind)
    return translator.problems(error)


class _Place(NamedTuple):
    """Where an error is: its path without pydantic's own labels, and what is expected there."""

    path: Path
    expected: FieldType | None
    parent: FieldType
    parent_raw: Any


class _Translator:
    def __init__(
        self,
        root: Node,
        plugin_class: PluginClass,
        start: Path = (),
        kind: FieldType | None = None,
    ) -> None:
        self._root = root
        self._start = start
        self._kind = kind or FieldType(section=RunConfig)
        node = root.get(*start)
        self._plain = all_inherited(node.plain()) if node is not None else {}
        self._plugin_class = plugin_class
        self._places: dict[str, list[str]] | None = None

    def problems(self, error: ValidationError) -> list[Problem]:
        """The problems of all errors, in their order; what a source inherits is said of its group."""
        lines = [(line, self._place(line["loc"])) for line in error.errors(include_url=False)]
        wrong = {place.path for _, place in lines}
        found = []
        for line, place in lines:
            of_group = _in_group(place.path)
            if of_group in wrong - {place.path} and self._root.get(*place.path) is None:
                continue
            former = self._former_keys(place) if self._is_unknown(line, place) else []
            found += former or [self._problem(_written_at(line, place), self._text(line, place))]
        return found

    def _is_unknown(self, line: Any, place: _Place) -> bool:
        """True for an unknown key, and for a table where none can be: its keys may be old ones."""
        expected = place.expected
        takes_keys = expected is None or expected.is_section or expected.values or expected.is_any
        has_keys = isinstance(line["input"], dict) and not takes_keys
        return line["type"] == "extra_forbidden" or has_keys

    def _problem(self, path: Path, text: str) -> Problem:
        origin, shown = locate(self._root, path)
        return Problem(origin, dotted(shown), text)

    def _former_keys(self, place: _Place) -> list[Problem]:
        """An unknown key, or those in its table, for which `former` says what to write instead."""
        section = place.parent.section_class(place.parent_raw, self._plugin_class)
        former = former_of((RLConfig, SFTConfig) if section is RunConfig else (section,))
        if place.parent.plugin is not None:
            former = {**former_keys.OF_KIND.get(place.parent.plugin.kind, {}), **former}
        node = self._root.get(*place.path)
        _, written = locate(self._root, place.path)
        above = dotted(written[2:-1] if written[0] == "stages" else written[:-1])
        return [
            self._problem((*place.path, *below), f"unknown key; {spelled_out(text, above)}")
            for below, text in answers(former, str(place.path[-1]), node)
        ]

    def _place(self, location: tuple[Any, ...]) -> _Place:
        expected: FieldType | None = self._kind
        path: Path = self._start
        place = _Place(path, expected, FieldType(), None)
        raw: Any = self._plain
        for part in location:
            if expected is None or part == "[key]":
                break
            if expected.variants and part in expected.variants:
                continue
            if not (expected.is_section or expected.item or expected.values or expected.is_any):
                break  # labels of a union's members
            parent, parent_raw = expected, raw
            expected = child_type(parent, parent_raw, part, self._plugin_class)
            raw = _inside(raw, part)
            path = (*path, part)
            place = _Place(path, expected, parent, parent_raw)
        return place

    def _text(self, line: Any, place: _Place) -> str:
        kind, found = line["type"], line["input"]
        expected = place.expected
        if kind == "extra_forbidden":
            return self._unknown_key(place)
        if kind in _OWN_TEXT:
            return str(line["msg"]).removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if kind == "missing" and expected is not None:
            return f"missing, expected {expected.describe()}"
        if kind == "wrong_type" and line["msg"].startswith("item"):
            return str(line["msg"])
        if kind.startswith("union_tag") and expected is not None:
            return _wrong_variant(found, expected, place)
        if kind in _MESSAGE_SAYS_MORE or expected is None or expected.is_any:
            return f"found {describe_value(found)}: {line['msg']}"
        hint = ""
        if isinstance(found, str):
            hint = did_you_mean(found, (str(literal) for literal in expected.literals))
        return f"found {describe_value(found)}, expected {expected.describe()}{_dot(hint)}"

    def _unknown_key(self, place: _Place) -> str:
        key = str(place.path[-1])
        section = place.parent.section_class(place.parent_raw, self._plugin_class)
        if section is RunConfig:
            return self._unknown_shared_key(key)
        known = list(section.model_fields) if section is not None else []
        hint = did_you_mean(key, known)
        elsewhere = [path for path in self._elsewhere(key) if path != dotted(place.path[2:])]
        if elsewhere:
            hint += f" It exists as {' and '.join(elsewhere[:3])}."
        if not hint and known:
            hint = f" Known keys here: {', '.join(known)}."
        return f"unknown key{_dot(hint)}"

    def _unknown_shared_key(self, key: str) -> str:
        owners = [
            name for name, one in (("rl", RLConfig), ("sft", SFTConfig)) if key in one.model_fields
        ]
        if key in ("type", "name") and owners:
            return "this key belongs to one stage; write it in its [[stages]] table"
        if owners:
            return f"unknown key: only {' and '.join(owners)} stages have it, and this run has none"
        known = {*RLConfig.model_fields, *SFTConfig.model_fields, *RunConfig.model_fields}
        hint = did_you_mean(key, known - {"plugin_versions"})
        elsewhere = self._elsewhere(key)
        if elsewhere:
            hint += f" It exists as {' and '.join(elsewhere[:3])}."
        return f"unknown key{_dot(hint)}"

    def _elsewhere(self, key: str) -> list[str]:
        """Paths of other sections that have a key of this name."""
        if self._places is None:
            self._places = {}
            for stage in (RLConfig, SFTConfig):
                for path, _, _ in every_path(stage, self._plugin_class):
                    places = self._places.setdefault(path[-1], [])
                    if path[-1] != "type" and dotted(path) not in places:
                        places.append(dotted(path))
        return self._places.get(key.replace("-", "_"), [])


def _inside(raw: Any, part: Any) -> Any:
    if isinstance(raw, dict):
        return raw.get(part)
    if isinstance(raw, list) and isinstance(part, int) and part < len(raw):
        return raw[part]
    return None


def _dot(hint: str) -> str:
    return f".{hint}" if hint else ""


def _written_at(line: Any, place: _Place) -> Path:
    """Where an error was made: a wrong variant at its `type`."""
    is_variant = line["type"].startswith("union_tag") and place.expected is not None
    has_type = isinstance(line["input"], dict) and "type" in line["input"]
    return (*place.path, "type") if is_variant and has_type else place.path


def _wrong_variant(found: Any, expected: FieldType, place: _Place) -> str:
    is_table = isinstance(found, dict)
    tag = found.get("type", expected.default_variant) if is_table else found
    names = " or ".join(map(repr, expected.variants))
    hint = did_you_mean(tag, expected.variants) if isinstance(tag, str) else ""
    text = f"found {describe_value(tag)}, expected {names}{_dot(hint)}"
    if former := former_keys.CHOICES.get((str(place.path[-1]), str(tag))):
        text = f"{text}; {former}"
    return text if is_table and "type" in found else f"type: {text}"


def locate(root: Node, path: Path) -> tuple[Origin, Path]:
    """(origin, path as written) of a place; for one that nobody wrote, those of what encloses it.

    A key that a source inherits is looked up in its group.
    """
    rest: Path = ()
    while True:
        for candidate in (path, _in_group(path)):
            node = root.get(*candidate)
            if node is not None:
                return node.origin, (*node.origin.path, *rest)
        path, rest = path[:-1], (path[-1], *rest)


def _in_group(path: Path) -> Path:
    """`orchestrator.train.source.0.sampling` -> `orchestrator.train.sampling`."""
    for index, key in enumerate(path[:-2]):
        if key == "source" and isinstance(path[index + 1], int):
            return (*path[:index], *path[index + 2 :])
    return path
