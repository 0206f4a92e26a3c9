"""What the configuration classes say about a key: its type, in a form that is easy to walk."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator
from pydantic.fields import FieldInfo

from prime_rl.configs.base import FillType, PluginConfig, PluginKind
from prime_rl.configs.tree import Key

PluginClass = Callable[[str, str], type[PluginConfig] | None]
"""(kind, name) -> the plugin's Config class; None when it cannot be had."""


@dataclass(frozen=True)
class FieldType:
    """What may stand at one place. Exactly one of section, variants, plugin, item, values is set,
    or none: then it is a scalar, or anything at all."""

    section: type[BaseModel] | None = None
    """A nested section."""
    variants: Mapping[str, type[BaseModel]] = field(default_factory=dict)
    """Sections told apart by their `type`."""
    default_variant: str = ""
    plugin: PluginKind | None = None
    """A section whose class a plugin brings."""
    item: FieldType | None = None
    """Type of a list's items."""
    values: FieldType | None = None
    """Type of a plain table's values."""
    scalars: frozenset[type] = frozenset()
    literals: tuple[Any, ...] = ()
    is_nullable: bool = False
    is_any: bool = False
    bounds: str = ""
    """`>= 1`, as text."""

    @property
    def is_section(self) -> bool:
        """True for a table with keys of its own classes."""
        return bool(self.section or self.variants or self.plugin)

    @property
    def is_switch(self) -> bool:
        """True for a boolean."""
        return bool in self.scalars

    def section_class(self, raw: Any, plugin_class: PluginClass) -> type[BaseModel] | None:
        """The class that a table stands for; None when it is no section or its type is unknown.

        `raw` is the plain value at this place, or anything else for the default variant.
        """
        if self.section is not None:
            return self.section
        tag = raw if isinstance(raw, str) else raw.get("type") if isinstance(raw, dict) else None
        if self.variants:
            return self.variants.get(tag if isinstance(tag, str) else self.default_variant)
        if self.plugin is not None:
            name = tag if isinstance(tag, str) else self.plugin.default
            return plugin_class(self.plugin.kind, name)
        return None

    def describe(self) -> str:
        """`an integer >= 1 or 'auto'`, for messages and help."""
        if self.plugin is not None:
            names = [f"the table of a plugin of kind {self.plugin.kind}"]
        elif self.variants:
            names = [f"a table with type {' | '.join(map(repr, self.variants))}"]
        elif self.section is not None or self.values is not None:
            names = ["a table"]
        elif self.item is not None:
            names = [f"a list of {_plural(self.item)}"]
        elif self.is_any:
            names = ["anything"]
        else:
            names = [text for kind, text in _SCALAR_NAMES.items() if kind in self.scalars]
        if names and self.bounds:
            names[-1] += f" {self.bounds}"
        names += [repr(literal) for literal in self.literals]
        names += ["None"] if self.is_nullable else []
        return " or ".join(names)


_SCALAR_NAMES: dict[Any, str] = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
}


def _plural(item: FieldType) -> str:
    if item.is_section:
        return "tables"
    names = {bool: "booleans", int: "integers", float: "numbers", str: "strings"}
    return next((text for kind, text in names.items() if kind in item.scalars), "values")


_BOUND_SIGNS = (
    ("ge", ">="),
    ("gt", ">"),
    ("le", "<="),
    ("lt", "<"),
    ("multiple_of", "multiple of"),
)


def _bounds(metadata: list[Any]) -> str:
    entries = [
        inner
        for entry in metadata
        for inner in (entry.metadata if isinstance(entry, FieldInfo) else [entry])
    ]
    parts = [
        f"{sign} {bound}"
        for entry in entries
        for name, sign in _BOUND_SIGNS
        if (bound := getattr(entry, name, None)) is not None
    ]
    return " and ".join(parts)


def field_type_of(info: FieldInfo) -> FieldType:
    """Type of a model's field."""
    return _with_metadata(_type_of(info.annotation), info.metadata)


def _type_of(annotation: Any) -> FieldType:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _with_metadata(_type_of(arguments[0]), list(arguments[1:]))
    if origin in (Union, UnionType):
        return _union([_type_of(argument) for argument in arguments])
    if origin is Literal:
        return FieldType(literals=arguments)
    if origin in (list, tuple, set, frozenset):
        return FieldType(item=_type_of(arguments[0]) if arguments else FieldType(is_any=True))
    if annotation in (list, tuple, set, frozenset):
        return FieldType(item=FieldType(is_any=True))
    if origin is dict or annotation is dict:
        return FieldType(values=_type_of(arguments[1]) if arguments else FieldType(is_any=True))
    if annotation is type(None):
        return FieldType(is_nullable=True)
    if annotation is Any or not isinstance(annotation, type):
        return FieldType(is_any=True)
    if issubclass(annotation, BaseModel):
        return FieldType(section=annotation)
    if annotation in (bool, int, float):
        return FieldType(scalars=frozenset({annotation}))
    return FieldType(scalars=frozenset({str}))  # str, Path, enums: written as a string


def _union(members: list[FieldType]) -> FieldType:
    """One description of all members. Several sections are told apart by their `type`."""
    nullable = any(member.is_nullable for member in members)
    real = [m for m in members if m != FieldType(is_nullable=True)]
    if len(real) == 1:
        return replace(real[0], is_nullable=nullable)
    if all(member.section is not None for member in real):
        variants = {
            tag: member.section
            for member in real
            if member.section is not None
            for tag in type_names(member.section)
        }
        return FieldType(variants=variants, is_nullable=nullable)
    if any(m.is_section or m.item or m.values or m.is_any for m in real):
        return FieldType(is_any=True, is_nullable=nullable)
    return FieldType(
        scalars=frozenset().union(*(member.scalars for member in real)),
        literals=tuple(literal for member in real for literal in member.literals),
        is_nullable=nullable,
        bounds=" and ".join(member.bounds for member in real if member.bounds),
    )


def type_names(section: type[BaseModel]) -> tuple[str, ...]:
    """Values of the section's `type: Literal[...]`; () when it has none."""
    info = section.model_fields.get("type")
    if info is None or get_origin(info.annotation) is not Literal:
        return ()
    return tuple(str(name) for name in get_args(info.annotation))


def _with_metadata(found: FieldType, metadata: list[Any]) -> FieldType:
    for entry in metadata:
        if isinstance(entry, PluginKind):
            found = FieldType(plugin=entry, is_nullable=found.is_nullable)
        if isinstance(entry, BeforeValidator) and isinstance(entry.func, FillType):
            found = replace(found, default_variant=entry.func.name)
    bounds = _bounds(metadata)
    return replace(found, bounds=bounds) if bounds else found


def child_type(
    parent: FieldType, raw: Any, key: Key, plugin_class: PluginClass
) -> FieldType | None:
    """Type of `key` inside a value of type `parent`; None when there is no such key.

    `raw` is the plain value of the parent, which decides among variants and plugins.
    """
    if parent.is_any:
        return FieldType(is_any=True)
    if parent.item is not None:
        return parent.item if isinstance(key, int) or key.isdecimal() else None
    if parent.values is not None:
        return parent.values
    section = parent.section_class(raw, plugin_class)
    if section is None or key not in section.model_fields:
        return None
    return field_type_of(section.model_fields[str(key)])


def every_path(
    section: type[BaseModel], plugin_class: PluginClass, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], FieldType, FieldInfo]]:
    """Every key below a section, depth first, with its type.

    Open and tagged sections are entered as their default; lists of tables by a part `N`.
    """
    for name, info in section.model_fields.items():
        here = field_type_of(info)
        yield (*path, name), here, info
        inside, below = (here.item, (*path, name, "N")) if here.item else (here, (*path, name))
        inner = inside.section_class(None, plugin_class)
        if inner is not None:
            yield from every_path(inner, plugin_class, below)
