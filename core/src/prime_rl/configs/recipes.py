"""Finds the recipe that a word means: a file, `plugin:recipe`, or the name of an installed one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prime_rl.configs.problems import did_you_mean
from prime_rl.configs.registry import PluginRecord, PluginRegistry
from prime_rl.errors import ConfigError

Recipes = Sequence[tuple[PluginRecord, str, Path]]


def find_recipe(
    text: str, registry: PluginRegistry, preferred: Sequence[PluginRecord] = ()
) -> Path:
    """The file that `text` means. Raises ConfigError with near matches.

    A word that ends in `.toml`, has a slash, or names a file here is a path. A bare name is looked
    for in the `preferred` plugins first.
    """
    path = Path(text)
    if text.endswith(".toml") or "/" in text or _is_file(path):
        if not _is_file(path):
            raise ConfigError(_no_such_file(path))
        return path
    installed = registry.recipes()
    plugin, separator, name = text.rpartition(":")
    candidates = [
        (record, file)
        for record, recipe, file in installed
        if recipe == name and (not separator or _means(plugin, record))
    ]
    own = {file for record, file in candidates if record in preferred}
    found = own or {file for _, file in candidates}
    if len(found) == 1:
        return found.pop()
    if found:
        choices = sorted(
            f"{record.name}:{recipe}" for record, recipe, _ in installed if recipe == name
        )
        raise ConfigError(
            f"more than one installed recipe is called {name!r}; write one of: {', '.join(choices)}"
        )
    raise ConfigError(_unknown(text, installed))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name too long, or with a null byte
        return False


def _means(plugin: str, record: PluginRecord) -> bool:
    """`plugin` may be a plugin's name, its distribution, or `distribution:name`."""
    normalised = plugin.strip().lower().replace("-", "_")
    names = (record.name, record.distribution, record.qualified_name)
    return normalised in (name.replace("-", "_") for name in names)


def _no_such_file(path: Path) -> str:
    text = f"no such recipe file: {path}"
    try:
        beside = [entry.name for entry in path.parent.glob("*.toml")]
    except (OSError, ValueError):
        beside = []
    hint = did_you_mean(path.name, beside)
    return f"{text}.{hint}" if hint else text


def _unknown(text: str, installed: Recipes) -> str:
    known = sorted({f"{record.name}:{recipe}" for record, recipe, _ in installed})
    names = [*known, *(recipe for _, recipe, _ in installed)]
    listed = ", ".join(known) or "none"
    return (
        f"no recipe is called {text!r}.{did_you_mean(text, names)} Installed: {listed}. "
        "A file is given by its path, with .toml."
    )
