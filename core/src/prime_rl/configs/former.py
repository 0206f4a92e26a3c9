"""Answers to keys of other recipes: what the `former` of a class says, with names spelled out."""

from __future__ import annotations

import re
from collections.abc import Iterable

from pydantic import BaseModel

from prime_rl.configs.base import BaseConfig
from prime_rl.configs.tree import Node, Path

NAME = re.compile(r"`(\.?)([a-z0-9_.]+)`")
"""A name in a text of `former`: the dot of one that begins at its section, and the rest."""


def former_of(sections: Iterable[type[BaseModel] | None]) -> dict[str, str]:
    """`former` of all the classes together."""
    known: dict[str, str] = {}
    for section in sections:
        if section is not None and issubclass(section, BaseConfig):
            known |= section.former
    return known


def answers(former: dict[str, str], name: str, node: Node | None) -> list[tuple[Path, str]]:
    """(place below the key, what to do) for an unknown key; [] when `former` does not know it.

    A table of which dotted entries name keys is answered key by key, each with its own entry or
    that of the table.
    """
    text = former.get(name) or former.get(_without_no(name))
    own: list[tuple[Path, str]] = [((), text)] if text else []
    if node is None or not node.is_table or not any(key.startswith(f"{name}.") for key in former):
        return own
    found: list[tuple[Path, str]] = []
    for key, child in node.value.items():
        for path, answer in answers(former, f"{name}.{key}", child) or own:
            found.append(((key, *path), answer))
    return found or own


def _without_no(name: str) -> str:
    """`train.no_filter` of the command line as `train.filter`."""
    table, dot, key = name.rpartition(".")
    return f"{table}{dot}{key.removeprefix('no_')}"


def spelled_out(text: str, section: str) -> str:
    """The text with full names; those that begin with a dot are below `section`."""
    here = f"{section}." if section else ""
    return NAME.sub(lambda name: f"{here if name[1] else ''}{name[2]}", text)
