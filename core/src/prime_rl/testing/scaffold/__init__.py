"""Writes the repository of a new plugin from the templates in this folder.

A template is a file `<kind>.py.txt` with `$placeholders`; the class in it must pass the kind's
conformance kit as written, which a test does for every kind.
"""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

from prime_rl import __version__
from prime_rl.errors import PluginError
from prime_rl.plugins.kinds import KINDS
from prime_rl.plugins.records import normalise_name

TEMPLATES = Path(__file__).parent

DEPENDENCIES = {
    "weight_transport": ("safetensors>=0.5",),
    "router": ("httpx>=0.27", "starlette>=0.40"),
}
"""What a kind's template imports beside prime-rl and torch."""

MORE_FILES = {
    "model": {
        "module.py": "model_module.py.txt",
        "recipes/debug.toml": "model_debug.toml.txt",
    }
}
"""Kind -> further file of the package -> its template."""

KIT_SETTINGS = {
    "model": """
    configs = (
        {
            "model_type": "$name",
            "vocab_size": 48,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        },
    )"""
}
"""What a kind's kit must be told; lines of the class in tests/test_conformance.py."""


def scaffolded_kinds() -> list[str]:
    """Kinds that have a template."""
    return [kind for kind in KINDS if (TEMPLATES / f"{kind}.py.txt").exists()]


def write_plugin(kind: str, name: str, parent: Path) -> Path:
    """Write `parent/prime-rl-<word>-<name>/` and return it.

    Raises PluginError when the kind has no template, the name is no plugin name, or the folder
    exists and is not empty.
    """
    if kind not in scaffolded_kinds():
        found = "is no plugin kind" if kind not in KINDS else "has no template"
        raise PluginError(f"{kind!r} {found}; choose one of: {', '.join(scaffolded_kinds())}")
    plain = normalise_name(name)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", plain):
        raise PluginError(
            f"{name!r} is no plugin name; expected letters, digits and underscores, a letter first"
        )
    values = placeholders(kind, plain)
    folder = parent / values["distribution"]
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PluginError(f"{folder} exists already; choose another name or --dir")
    for path, text in files(kind, values).items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    return folder


def placeholders(kind: str, name: str) -> dict[str, str]:
    """What the templates' `$placeholders` stand for."""
    word = KINDS[kind].word
    package = f"prime_rl_{word}_{name}"
    class_name = "".join(part.capitalize() for part in name.split("_"))
    if keyword.iskeyword(class_name):
        class_name += "Plugin"
    major, minor = __version__.split(".")[:2]
    contract = KINDS[kind].contract.rpartition(":")[2]
    extra = "".join(f', "{line}"' for line in DEPENDENCIES.get(kind, ()))
    kit_settings = Template(KIT_SETTINGS.get(kind, "")).substitute(name=name)
    return {
        "kind": kind,
        "name": name,
        "word": word,
        "package": package,
        "distribution": package.replace("_", "-"),
        "class_name": class_name,
        "contract": contract,
        "group": KINDS[kind].group,
        "config_field": KINDS[kind].config_field,
        "requires_core": f"prime-rl>={major}.{minor},<{int(major) + 1}",
        "extra_dependencies": extra,
        "kit_settings": kit_settings,
    }


def files(kind: str, values: dict[str, str]) -> dict[str, str]:
    """Path -> text of every file of the repository."""
    source = f"src/{values['package']}"
    templates = {
        "pyproject.toml": "pyproject.toml.txt",
        "README.md": "README.md.txt",
        f"{source}/__init__.py": "package.py.txt",
        f"{source}/{values['word']}.py": f"{kind}.py.txt",
        "tests/test_conformance.py": "test_conformance.py.txt",
        **{f"{source}/{path}": more for path, more in MORE_FILES.get(kind, {}).items()},
    }
    return {
        path: Template((TEMPLATES / template).read_text()).substitute(values)
        for path, template in templates.items()
    }
