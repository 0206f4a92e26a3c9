"""Raw configuration: nested values that remember the file, line and path they were written at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Key = str | int
Path = tuple[Key, ...]

COMMAND_LINE = "command line"
NOWHERE = ""


class Origin(NamedTuple):
    """Where a value was written."""

    source: str
    """File name, COMMAND_LINE, or NOWHERE for what nobody wrote."""
    line: int | None
    """Line of the key in the file, from 1."""
    path: Path
    """Path as it was written there."""

    def describe(self) -> str:
        """`recipe.toml:12`."""
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True)
class Node:
    """A value: a table (dict of nodes), a list of nodes, or a scalar."""

    value: Any
    origin: Origin

    @property
    def is_table(self) -> bool:
        """True for a table."""
        return isinstance(self.value, dict)

    @property
    def is_list(self) -> bool:
        """True for a list."""
        return isinstance(self.value, list)

    def get(self, *path: Key) -> Node | None:
        """The node at `path`; None when there is none."""
        node: Node | None = self
        for key in path:
            if node is None:
                return None
            if node.is_table:
                node = node.value.get(key)
            elif node.is_list and isinstance(key, int) and 0 <= key < len(node.value):
                node = node.value[key]
            else:
                return None
        return node

    def plain(self) -> Any:
        """The value without origins."""
        if self.is_table:
            return {key: node.plain() for key, node in self.value.items()}
        if self.is_list:
            return [node.plain() for node in self.value]
        return self.value

    def with_key(self, key: str, node: Node) -> Node:
        """A copy of this table with one key replaced."""
        return Node({**self.value, key: node}, self.origin)

    def without(self, *keys: str) -> Node:
        """A copy of this table without some keys."""
        kept = {key: node for key, node in self.value.items() if key not in keys}
        return Node(kept, self.origin)

    def only(self, keys: Mapping[str, Any] | set[str]) -> Node:
        """A copy of this table with just these keys."""
        return Node({k: node for k, node in self.value.items() if k in keys}, self.origin)


def empty_table(origin: Origin = Origin(NOWHERE, None, ())) -> Node:
    """A table without keys."""
    return Node({}, origin)


def nodes_from(
    value: Any, source: str, lines: Mapping[Path, int], path: Path = (), line: int | None = None
) -> Node:
    """Nodes for a parsed document. A path without a line of its own has its parent's.

    The string "None" becomes null.
    """
    line = lines.get(path, line)
    origin = Origin(source, line, path)
    if isinstance(value, dict):
        inner = {k: nodes_from(v, source, lines, (*path, k), line) for k, v in value.items()}
        return Node(inner, origin)
    if isinstance(value, list):
        items = [nodes_from(v, source, lines, (*path, i), line) for i, v in enumerate(value)]
        return Node(items, origin)
    return Node(None if value == "None" else value, origin)


def merge(base: Node, over: Node) -> Node:
    """`over` on top of `base`: tables key by key, everything else replaced.

    A table that names another `type` replaces the whole table: the keys of one variant mean nothing
    to another. A table whose keys are all numbers changes items of a list; the number after the
    last appends.
    """
    if not over.is_table:
        return over
    if base.is_list and over.value and all(key.isdecimal() for key in over.value):
        return _merge_items(base, over)
    if isinstance(base.value, str):
        base = Node({"type": base}, base.origin)
    if not base.is_table or names_other_type(base, over):
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return Node(merged, base.origin if base.origin.source != NOWHERE else over.origin)


def _merge_items(base: Node, over: Node) -> Node:
    items = list(base.value)
    for key in sorted(over.value, key=int):
        index = int(key)
        if index < len(items):
            items[index] = merge(items[index], over.value[key])
        elif index == len(items):
            items.append(over.value[key])
        else:
            return over  # refused later as a table where a list is expected
    return Node(items, base.origin)


def names_other_type(base: Node, over: Node) -> bool:
    """True when both tables have a `type` and the two differ."""
    mine, other = base.get("type"), over.get("type")
    if mine is None or other is None:
        return False
    return bool(_same_name(mine.value) != _same_name(other.value))


def _same_name(value: Any) -> Any:
    return value.strip().lower().replace("-", "_") if isinstance(value, str) else value
