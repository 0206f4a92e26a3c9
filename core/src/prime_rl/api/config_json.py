"""Reads a checkpoint's config.json key by key; every complaint names the key."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from prime_rl.errors import ConfigError

_REQUIRED: Any = object()


class ConfigJson:
    """A config.json, or a table inside one. Model plugins read their architecture through it."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self.values = values
        self.path = path
        """Where this table stands in config.json, with a trailing dot; "" at the top."""

    def integer(
        self, key: str, *aliases: str, default: Any = _REQUIRED, minimum: int | None = 1
    ) -> Any:
        """An int of at least `minimum` (None: any). `aliases` are older names of the key; the
        default, which may be None, stands in when the key is absent or null."""
        name, value = self._find(key, aliases, default)
        if value is default and name is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise self._wrong(name or key, value, "an integer")
        if minimum is not None and value < minimum:
            raise self._wrong(name or key, value, f"at least {minimum}")
        return value

    def number(self, key: str, *aliases: str, default: Any = _REQUIRED) -> Any:
        """A finite float."""
        name, value = self._find(key, aliases, default)
        if value is default and name is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self._wrong(name or key, value, "a finite number")
        return float(value)

    def boolean(self, key: str, *aliases: str, default: Any = _REQUIRED) -> Any:
        """True or false."""
        name, value = self._find(key, aliases, default)
        if value is default and name is None:
            return default
        if not isinstance(value, bool):
            raise self._wrong(name or key, value, "true or false")
        return value

    def text(self, key: str, *aliases: str, default: Any = _REQUIRED) -> Any:
        """A string."""
        name, value = self._find(key, aliases, default)
        if value is default and name is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name or key, value, "a string")
        return value

    def sequence(self, key: str, *aliases: str, default: Any = _REQUIRED) -> Any:
        """A list, as a tuple."""
        name, value = self._find(key, aliases, default)
        if value is default and name is None:
            return default
        if not isinstance(value, list | tuple):
            raise self._wrong(name or key, value, "a list")
        return tuple(value)

    def table(self, key: str, *aliases: str) -> ConfigJson | None:
        """A nested table, or None when absent or null."""
        name, value = self._find(key, aliases, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name or key, value, "a table")
        return ConfigJson(value, f"{self.path}{name}.")

    def expect(self, key: str, *accepted: Any) -> None:
        """Raise ConfigError when the key is present with a value that is not implemented."""
        value = self.values.get(key, accepted[0])
        if value not in accepted:
            choices = " or ".join(repr(choice) for choice in accepted)
            raise self._wrong(key, value, f"{choices}; other values are not implemented")

    def _find(self, key: str, aliases: tuple[str, ...], default: Any) -> tuple[str | None, Any]:
        for name in (key, *aliases):
            if self.values.get(name) is not None:
                return name, self.values[name]
        if default is _REQUIRED:
            raise ConfigError(f"config.json: {self.path}{key} is missing")
        return None, default

    def _wrong(self, key: str, value: Any, expected: str) -> ConfigError:
        return ConfigError(f"config.json: {self.path}{key}: found {value!r}, expected {expected}")
