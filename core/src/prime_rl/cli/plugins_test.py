"""`prime plugins test NAME`: runs the conformance kit of the plugin's kind in a child process."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from prime_rl.cli.plugins_show import named
from prime_rl.errors import PluginError
from prime_rl.plugins import KINDS, PluginRecord, scan
from prime_rl.plugins.recipes import find_recipes

app = typer.Typer(rich_markup_mode=None, add_completion=False)

TEST_FILE = '''\
"""Written by `prime plugins test`."""

from {module} import {kit}


class TestPlugin({kit}):
    plugin_name = "{name}"
    {settings}
'''

VOCABULARY = 64
"""Of the models that are tried, where the recipe leaves it to the tokenizer."""


@app.command()
def test(
    name: Annotated[str, typer.Argument(help="Plugin name, or distribution:name.")],
    kind: Annotated[str | None, typer.Option(help="Only of this kind.")] = None,
) -> None:
    """Run an installed plugin through the conformance kit of its kind (needs pytest)."""
    records = [record for record in named(scan(), name, kind) if record.kind in KINDS]
    if not records:
        raise PluginError(f"{name!r} is a listener or a command; these kinds have no kit")
    if importlib.util.find_spec("pytest") is None:
        raise PluginError("the kits run under pytest: pip install pytest")
    for record in records:
        typer.echo(f"{record.describe()}: {kit_of(record.kind)[1]}")
        code = run_kit(record)
        if code:
            raise typer.Exit(code)


def run_kit(record: PluginRecord) -> int:
    """Run the kit in a child process; its exit code (0: the plugin conforms)."""
    module, kit = kit_of(record.kind)
    with tempfile.TemporaryDirectory(prefix="prime-plugin-test-") as folder:
        path = Path(folder) / f"test_{record.name.replace('.', '_')}.py"
        path.write_text(
            TEST_FILE.format(
                module=module, kit=kit, name=record.name_in_config, settings=kit_settings(record)
            )
        )
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "--rootdir",
            folder,
            "-c",
            _empty_settings(folder),
        ]
        return subprocess.run([sys.executable, "-m", "pytest", *options, str(path)]).returncode


def kit_settings(record: PluginRecord) -> str:
    """What the kit must be told beside the name: for a model, tiny architectures.

    They are those of the plugin's own recipes that make a fresh model of its type.
    """
    if record.kind != "model":
        return ""
    model_class: Any = scan().load(record.kind, record.name_in_config)
    types: tuple[str, ...] = model_class.model_types
    configs: list[dict[str, Any]] = []
    for path in find_recipes(record).values():
        for architecture in _fresh_architectures(tomllib.loads(path.read_text())):
            config = {"vocab_size": VOCABULARY, **architecture}
            if config.get("model_type") in types and config not in configs:
                configs.append(config)
    if not configs:
        raise PluginError(
            f"{record.describe()} ships no recipe with [model.fresh.architecture] and a model_type "
            f"of {', '.join(types)}; the kit needs a small architecture to build"
        )
    return f"configs = {tuple(configs)!r}"


def _fresh_architectures(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Every `model.fresh.architecture` of a recipe, also inside its stages."""
    fresh = table.get("model", {}).get("fresh", {})
    if "architecture" in fresh:
        yield fresh["architecture"]
    for stage in table.get("stages", []):
        yield from _fresh_architectures(stage)


def _empty_settings(folder: str) -> str:
    """An empty pytest settings file, so that none of a parent folder applies."""
    path = Path(folder) / "pytest.ini"
    path.write_text("[pytest]\n")
    return str(path)


def kit_of(kind: str) -> tuple[str, str]:
    """(module, class) of a kind's kit; read from the source, so that pytest imports it first."""
    module = f"prime_rl.testing.{kind}"
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise PluginError(f"there is no conformance kit for the kind {kind} yet", kind=kind)
    tree = ast.parse(Path(spec.origin).read_text())
    kits = [
        n.name for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("Conformance")
    ]
    if not kits:
        raise PluginError(f"{module} holds no class whose name ends in Conformance", kind=kind)
    return module, kits[0]
