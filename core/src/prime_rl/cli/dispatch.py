"""A table of commands: help without importing any of them, and the one invoked is imported."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from prime_rl.errors import PrimeError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Command(NamedTuple):
    """One command.

    `target` is a module, or `module:object`. The object (in a module: `app`, or else `command`) is
    a typer application, or a function that takes the list of arguments and returns the exit code.
    """

    name: str
    target: str
    help: str


def find(commands: Iterable[Command], name: str) -> Command | None:
    """The command of that name; dash equals underscore."""
    wanted = name.replace("_", "-")
    return next((c for c in commands if c.name.replace("_", "-") == wanted), None)


def help_lines(commands: Sequence[Command]) -> list[str]:
    """One line per command, names aligned."""
    width = max((len(command.name) for command in commands), default=0)
    return [f"  {command.name:<{width}}  {command.help}".rstrip() for command in commands]


def invoke(command: Command, arguments: Sequence[str], program: str) -> int:
    """Import the command, run it, and return its exit code. Lets its exceptions through."""
    target = _resolve(command.target)
    typer = sys.modules.get("typer")
    try:
        if typer is not None and isinstance(target, typer.Typer):
            target.pretty_exceptions_enable = False
            result = target(args=list(arguments), prog_name=f"{program} {command.name}")
        else:
            result = target(list(arguments))
    except SystemExit as stop:
        return exit_code(stop)
    return result if isinstance(result, int) else 0


def exit_code(stop: SystemExit) -> int:
    """The number a SystemExit stands for; a text is printed and is 1, as Python does at exit."""
    if stop.code is None or isinstance(stop.code, int):
        return stop.code or 0
    print(stop.code, file=sys.stderr)
    return EXIT_FAILED


def report(error: PrimeError) -> int:
    """Print the error for a person; the exit code."""
    print(f"error: {error}", file=sys.stderr)
    return EXIT_FAILED


def _resolve(target: str) -> Any:
    module_name, _, attribute = target.partition(":")
    module = importlib.import_module(module_name)
    if not attribute:
        attribute = "app" if hasattr(module, "app") else "command"
    found: Any = module
    for part in attribute.split("."):
        found = getattr(found, part)
    return found
