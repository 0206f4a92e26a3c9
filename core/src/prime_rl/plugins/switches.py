"""Which plugins may be used: PRIME_PLUGINS, `[plugins] allow/deny/required`, `--no-plugin`."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import NamedTuple

from prime_rl.plugins.records import PluginRecord, normalise_distribution, split_name

ENVIRONMENT_VARIABLE = "PRIME_PLUGINS"


class Switches(NamedTuple):
    """Everything that can turn a plugin off; read before anything is imported.

    A listed item is a plugin name, a distribution, or `distribution:name`. Core's own members stay
    when `PRIME_PLUGINS` or `allow` do not name them; only `deny` and `--no-plugin` remove them.
    """

    environment: tuple[str, ...] | None = None
    """Names in PRIME_PLUGINS; None: all; (): none."""
    allow: tuple[str, ...] | None = None
    """Only these; None: all."""
    deny: tuple[str, ...] = ()
    """Never these."""
    required: tuple[str, ...] = ()
    """Must be present and usable."""
    no_plugin: tuple[str, ...] = ()
    """Never these; from the command line."""

    @classmethod
    def read(
        cls,
        *,
        allow: Iterable[str] | None = None,
        deny: Iterable[str] = (),
        required: Iterable[str] = (),
        no_plugin: Iterable[str] = (),
    ) -> Switches:
        """The environment's PRIME_PLUGINS together with the given lists."""
        return cls(
            environment=parse_environment(os.environ.get(ENVIRONMENT_VARIABLE)),
            allow=None if allow is None else tuple(allow),
            deny=tuple(deny),
            required=tuple(required),
            no_plugin=tuple(no_plugin),
        )

    def reason_disabled(self, record: PluginRecord) -> str:
        """Why `record` may not be used; "" when it may."""
        if names_record(self.no_plugin, record):
            return "switched off by --no-plugin"
        if names_record(self.deny, record):
            return "switched off by [plugins] deny"
        if record.is_core:
            return ""
        if self.environment is not None and not names_record(self.environment, record):
            listed = ",".join(self.environment) or "none"
            return (
                f"switched off by the environment: {ENVIRONMENT_VARIABLE}={listed} does not name it"
            )
        if self.allow is not None and not names_record(self.allow, record):
            return "switched off: not named in [plugins] allow"
        return ""

    def items(self) -> list[tuple[str, str]]:
        """(which switch, name) for every name in any list."""
        return [
            *((ENVIRONMENT_VARIABLE, name) for name in self.environment or ()),
            *(("[plugins] allow", name) for name in self.allow or ()),
            *(("[plugins] deny", name) for name in self.deny),
            *(("[plugins] required", name) for name in self.required),
            *(("--no-plugin", name) for name in self.no_plugin),
        ]


def parse_environment(value: str | None) -> tuple[str, ...] | None:
    """PRIME_PLUGINS as a tuple of names; unset, empty or `all` is None, `none` is ()."""
    text = (value or "").strip()
    if text.lower() in ("", "all"):
        return None
    if text.lower() == "none":
        return ()
    return tuple(name for part in text.split(",") if (name := part.strip()))


def item_names_record(item: str, record: PluginRecord) -> bool:
    """Whether one listed item means this record."""
    distribution, name = split_name(item)
    if distribution:
        return distribution == record.distribution and name == record.name
    return name == record.name or normalise_distribution(item) == record.distribution


def names_record(items: Iterable[str], record: PluginRecord) -> bool:
    """Whether any of the listed items means this record."""
    return any(item_names_record(item, record) for item in items)
