"""Reads TOML files into nodes, with the line of every key."""

from __future__ import annotations

import math
import os
import re
import tomllib
from pathlib import Path as FilePath
from typing import Any

from prime_rl.configs.tree import Node, Path, nodes_from
from prime_rl.errors import ConfigError

_BARE_VALUE = re.compile(r"[^,\]}#\n]+")
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_BLANK = re.compile(r"[ \t]*")

MAX_BYTES = 16 * 2**20
"""A configuration file is never larger; guards against reading a checkpoint by mistake."""


def read_toml(path: FilePath) -> Node:
    """The file's table. Raises ConfigError for a file that is missing, unreadable or not TOML."""
    shown = os.fspath(path)
    try:
        if path.is_dir():
            raise ConfigError(f"{shown}: found a folder, expected a TOML file")
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{shown}: larger than {MAX_BYTES} bytes; is this a recipe?")
        text = path.read_bytes().decode()
    except (OSError, ValueError) as error:
        raise ConfigError(f"{shown}: cannot be read: {error}") from error
    return parse_toml(text, shown)


def parse_toml(text: str, source: str) -> Node:
    """The document's table; `source` names it in messages. Raises ConfigError when it is not TOML."""
    try:
        document = tomllib.loads(text)
        return nodes_from(document, source, Scanner(text).lines())
    except ValueError as error:
        raise ConfigError(f"{source}: not valid TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{source}: not usable: nested too deeply") from error


def unsuitable(value: Any) -> str:
    """Why a scalar that TOML and JSON can spell has no place in a configuration; "" when it has."""
    if isinstance(value, float) and not math.isfinite(value):
        return "expected a finite number"
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return "expected an integer that fits in 64 bits"
    if value is None or isinstance(value, (bool, int, float, str)):
        return ""
    return "dates and times have no use here; write it in quotes"


class Scanner:
    """Finds the line of every key of a document that `tomllib` accepted."""

    def __init__(self, text: str) -> None:
        self._text = text.replace("\r\n", "\n")
        self._at = 0
        self._line = 1
        self._counted_to = 0
        self._lines: dict[Path, int] = {}
        self._counts: dict[Path, int] = {}

    def lines(self) -> dict[Path, int]:
        """Path -> line, from 1; items of arrays of tables are paths with their number."""
        table: Path = ()
        self._skip(_SPACE)
        while self._at < len(self._text):
            if self._peek() == "[":
                table = self._header()
            else:
                self._assignment(table)
            self._skip(_SPACE)
        return self._lines

    def _header(self) -> Path:
        line = self._current_line()
        is_array = self._text.startswith("[[", self._at)
        self._at += 2 if is_array else 1
        keys = self._keys()
        self._at += 2 if is_array else 1
        path: Path = ()
        for key in keys[:-1]:
            path = self._item((*path, key))
            self._lines.setdefault(path, line)
        path = (*path, keys[-1])
        self._lines.setdefault(path, line)
        if is_array:
            self._counts[path] = self._counts.get(path, -1) + 1
            path = self._item(path)
            self._lines[path] = line
        return path

    def _item(self, path: Path) -> Path:
        """The last item of an array of tables; any other path unchanged."""
        return (*path, self._counts[path]) if path in self._counts else path

    def _assignment(self, table: Path) -> None:
        line = self._current_line()
        path = table
        for key in self._keys():
            path = (*path, key)
            self._lines.setdefault(path, line)
        self._at += 1  # the equals sign
        self._skip(_BLANK)
        self._value(path)

    def _keys(self) -> list[str]:
        """A dotted key; stops at what follows it."""
        keys = []
        while True:
            self._skip(_BLANK)
            keys.append(self._key())
            self._skip(_BLANK)
            if self._peek() != ".":
                return keys
            self._at += 1

    def _key(self) -> str:
        if self._peek() in "\"'":
            start = self._at
            self._string()
            (key,) = tomllib.loads(f"{self._text[start : self._at]} = 0")
            return key
        match = _BARE_KEY.match(self._text, self._at)
        assert match is not None, "tomllib accepted a key that is neither bare nor quoted"
        self._at = match.end()
        return match[0]

    def _value(self, path: Path) -> None:
        self._lines.setdefault(path, self._current_line())
        first = self._peek()
        if first in "\"'":
            self._string()
        elif first == "[":
            self._array(path)
        elif first == "{":
            self._inline_table(path)
        else:
            match = _BARE_VALUE.match(self._text, self._at)
            self._at = match.end() if match else self._at + 1

    def _array(self, path: Path) -> None:
        self._at += 1
        index = 0
        while self._at < len(self._text):
            self._skip(_SPACE)
            if self._peek() == "]":
                self._at += 1
                return
            self._value((*path, index))
            index += 1
            self._skip(_SPACE)
            if self._peek() == ",":
                self._at += 1

    def _inline_table(self, path: Path) -> None:
        self._at += 1
        while self._at < len(self._text):
            self._skip(_SPACE)
            if self._peek() == "}":
                self._at += 1
                return
            self._assignment(path)
            self._skip(_SPACE)
            if self._peek() == ",":
                self._at += 1

    def _string(self) -> None:
        quote = self._peek()
        fence = quote * 3 if self._text.startswith(quote * 3, self._at) else quote
        self._at += len(fence)
        while self._at < len(self._text) and not self._text.startswith(fence, self._at):
            self._at += 2 if self._peek() == "\\" and quote == '"' else 1
        self._at += len(fence)
        while len(fence) == 3 and self._peek() == quote:  # a string may end in quotes of its own
            self._at += 1

    def _peek(self) -> str:
        return self._text[self._at] if self._at < len(self._text) else "\0"

    def _skip(self, pattern: re.Pattern[str]) -> None:
        match = pattern.match(self._text, self._at)
        assert match is not None
        self._at = match.end()

    def _current_line(self) -> int:
        self._line += self._text.count("\n", self._counted_to, self._at)
        self._counted_to = self._at
        return self._line
