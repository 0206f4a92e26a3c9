"""The recipes a plugin's package ships in its folder `recipes/`, found without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from prime_rl.plugins.records import PluginRecord


def package_folder(record: PluginRecord) -> Path | None:
    """Folder of the plugin's top-level package; None when it is not importable or a single file."""
    top_level = record.target.partition(":")[0].partition(".")[0]
    try:
        spec = importlib.util.find_spec(top_level)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def find_recipes(record: PluginRecord) -> dict[str, Path]:
    """Recipe name -> TOML file, by name; core's own members ship none. {} when there are none."""
    folder = None if record.is_core else package_folder(record)
    if folder is None:
        return {}
    return {path.stem: path for path in sorted((folder / "recipes").glob("*.toml"))}
