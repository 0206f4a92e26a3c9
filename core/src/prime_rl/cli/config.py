"""`prime config`: show the resolved configuration, check it, or print its schema."""

from __future__ import annotations

import json
import sys
from typing import Any

from prime_rl.cli.dispatch import EXIT_USAGE, Command, find, help_lines
from prime_rl.errors import PrimeError

COMMANDS = (
    Command("show", "", "Print the resolved configuration of a recipe as TOML (--json: as JSON)."),
    Command("schema", "", "Print the JSON schema of a run, with all installed plugins' settings."),
    Command("validate", "", "Check a recipe; prints what is wrong and ends with code 2."),
)

USAGE = """\
Usage: prime config COMMAND [RECIPE] [@ FILE]... [OPTIONS]

Recipe, files and options are those of `prime run`; `prime run --help` lists every key.

Commands:
"""


def command(arguments: list[str]) -> int:
    """Run one of the commands above."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(USAGE + "\n".join(help_lines(COMMANDS)))
        return 0
    chosen = find(COMMANDS, arguments[0])
    if chosen is None:
        print(
            f"error: no such command: prime config {arguments[0]}\nTry: prime config --help",
            file=sys.stderr,
        )
        return EXIT_USAGE
    words = arguments[1:]
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    if chosen.name == "schema":
        return _schema(words)
    try:
        return _show(words, as_json) if chosen.name == "show" else _validate(words)
    except PrimeError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


def _schema(words: list[str]) -> int:
    from prime_rl.configs.schema import run_schema
    from prime_rl.plugins import scan

    if words:
        print(f"error: prime config schema takes no {words[0]!r}", file=sys.stderr)
        return EXIT_USAGE
    schema = run_schema(scan())
    print(json.dumps(schema, indent=2))
    for problem in schema.get("x-problems", []):
        print(f"left out: {problem}", file=sys.stderr)
    return 0


def _load(words: list[str]) -> Any:
    from prime_rl.configs.load import load_run
    from prime_rl.plugins import scan

    loaded = load_run(words, scan())
    for warning in loaded.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return loaded


def _show(words: list[str], as_json: bool) -> int:
    loaded = _load(words)
    if loaded.arguments.help:
        print(USAGE + "\n".join(help_lines(COMMANDS)))
        return 0
    print(loaded.run.model_dump_json(indent=2) if as_json else as_toml(loaded.run))
    return 0


def as_toml(run: Any) -> str:
    """The run as a recipe that resolves to itself: null is written "None"."""
    import tomli_w

    values = run.model_dump(mode="json", exclude={"plugin_versions"})
    return tomli_w.dumps(_without_null(values)).rstrip()


def _without_null(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_null(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_without_null(one) for one in value]
    return "None" if value is None else value


def _validate(words: list[str]) -> int:
    from prime_rl.launch.capabilities import check

    loaded = _load(words)
    if loaded.arguments.help:
        print(USAGE + "\n".join(help_lines(COMMANDS)))
        return 0
    for index, stage in enumerate(loaded.run.stages):
        check(loaded.run, index, loaded.registry, stage.trainer.device)
    stages = ", ".join(stage.type for stage in loaded.run.stages)
    print(f"OK: {loaded.run.run.name} ({stages})")
    return 0
