"""`prime plugins`: the table of its commands; each is a module of its own, imported when used."""

from __future__ import annotations

import sys

from prime_rl.cli.dispatch import EXIT_USAGE, Command, find, help_lines, invoke

COMMANDS = (
    Command("list", "prime_rl.cli.plugins_list", "List installed plugins; imports none of them."),
    Command(
        "show", "prime_rl.cli.plugins_show", "Show a plugin's settings, capabilities, recipes."
    ),
    Command(
        "doctor", "prime_rl.cli.plugins_doctor", "Load every plugin and check the installation."
    ),
    Command("new", "prime_rl.cli.plugins_new", "Write the repository of a new plugin."),
    Command(
        "test", "prime_rl.cli.plugins_test", "Run a plugin through its kind's conformance kit."
    ),
)

USAGE = """\
Usage: prime plugins COMMAND [ARGUMENTS]...

List, inspect, check and create plugins.

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
            f"error: no such command: prime plugins {arguments[0]}\nTry: prime plugins --help",
            file=sys.stderr,
        )
        return EXIT_USAGE
    return invoke(chosen, arguments[1:], "prime plugins")
