"""The program `prime` (and `prime-rl`): help from tables and metadata, one command imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from prime_rl import __version__
from prime_rl.cli.dispatch import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    Command,
    find,
    help_lines,
    invoke,
    report,
)
from prime_rl.errors import PrimeError

if TYPE_CHECKING:
    from prime_rl.plugins import PluginRecord

COMMANDS = (
    Command(
        "run", "prime_rl.cli.run", "Run a recipe: fine-tuning, reinforcement learning, or both."
    ),
    Command("config", "prime_rl.cli.config", "Show, check or describe a resolved configuration."),
    Command("plugins", "prime_rl.cli.plugins", "List, inspect, check and create plugins."),
    Command("serve", "prime_rl.cli.serve", "Serve a model with one engine."),
    Command("trainer", "prime_rl.cli.trainer", "Start the trainer alone, from a resolved config."),
    Command(
        "orchestrator",
        "prime_rl.cli.orchestrator",
        "Start the orchestrator alone, from a resolved config.",
    ),
    Command(
        "env-server",
        "prime_rl.cli.env_server",
        "Start one environment server, from a resolved config.",
    ),
)
"""Core's own commands; help never imports them."""

ABOUT = """\
Usage: prime [OPTIONS] COMMAND [ARGUMENTS]...

Asynchronous reinforcement learning, fine-tuning and evaluation of language models."""

OPTIONS = """\
Options:
  --version   Print the version and leave.
  -h, --help  Print this and leave. Works after a command too."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line (default: this process's) and return the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _dispatch(words)
    except PrimeError as error:
        return report(error)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output has gone: `prime plugins list | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _dispatch(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    name, *rest = words
    if name == "--version":
        print(f"prime-rl {__version__}")
        return 0
    if name.startswith("-"):
        return _usage_error(f"no such option: {name}")
    command = find(COMMANDS, name)
    if command is not None:
        return invoke(command, rest, "prime")
    return _invoke_from_plugin(name, rest)


def help_text() -> str:
    """The whole of `prime --help`. Plugins' commands come from metadata; nothing is imported."""
    from prime_rl.plugins import COMMAND, scan

    registry = scan()
    sections = [ABOUT, "Commands:\n" + "\n".join(help_lines(COMMANDS))]
    added = [_listed(record) for record in registry.of_kind(COMMAND)]
    if added:
        sections.append("Commands of plugins:\n" + "\n".join(help_lines(added)))
    if registry.problems:
        sections.append(
            f"{len(registry.problems)} installed distribution(s) with broken metadata were skipped; "
            "see prime plugins list."
        )
    return "\n\n".join([*sections, OPTIONS])


def _listed(record: PluginRecord) -> Command:
    """A plugin's command for the help: how to call it, and what it is or why it cannot be used."""
    name = record.name_in_config.replace("_", "-")
    if find(COMMANDS, name) is not None:  # core's own name stays core's
        name = record.qualified_name
    text = record.summary if record.state == "ok" else f"{record.state}: {record.reason}"
    return Command(name, record.target, f"{text} ({record.distribution} {record.version})")


def _invoke_from_plugin(name: str, arguments: list[str]) -> int:
    """Run a command that a plugin brings; whatever its import raises is told with its wheel."""
    from prime_rl.plugins import COMMAND, scan
    from prime_rl.plugins.records import OK, split_name
    from prime_rl.plugins.unknown import near_matches

    distribution, plain = split_name(name)
    records = [
        record
        for record in scan().of_kind(COMMAND)
        if record.name == plain and distribution in ("", record.distribution)
    ]
    if not records:
        known = [command.name for command in COMMANDS]
        known += [record.name.replace("_", "-") for record in scan().of_kind(COMMAND)]
        matches = near_matches(name, known)
        hint = f" Did you mean {' or '.join(matches)}?" if matches else ""
        return _usage_error(f"no such command: {name}.{hint}")
    usable = [r for r in records if r.state == OK or (distribution and r.state == "conflicting")]
    if not usable:
        from prime_rl.plugins.unknown import not_usable

        raise not_usable(COMMAND, name, records)
    from prime_rl.plugins.load import load_object

    record = usable[0]
    load_object(record)
    return invoke(Command(name, record.target, record.summary), arguments, "prime")


def _usage_error(text: str) -> int:
    print(f"error: {text}\nTry: prime --help", file=sys.stderr)
    return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
