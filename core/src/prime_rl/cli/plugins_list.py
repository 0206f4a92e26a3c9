"""`prime plugins list`: kind, name, distribution, version, state; from metadata only.

Uses argparse and plain columns instead of typer and rich, which together would cost half of the
150 ms that listing may take.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from prime_rl import __version__
from prime_rl.plugins import GROUPS, PluginRecord, Registry, Switches, scan

SCHEMA_VERSION = 1
"""Of the JSON output; a change that removes or renames a key increases it."""

COLUMNS = ("kind", "name", "distribution", "version", "state")


def command(arguments: list[str]) -> int:
    """List; always exit code 0, however broken a plugin is."""
    parser = argparse.ArgumentParser("prime plugins list", description="List installed plugins.")
    parser.add_argument("--kind", choices=list(GROUPS.values()), help="only this kind")
    parser.add_argument("--json", action="store_true", help="print JSON with a schema version")
    parser.add_argument(
        "--no-plugin", action="append", default=[], metavar="NAME", help="as for prime run"
    )
    try:
        options = parser.parse_args(arguments)
    except SystemExit as stop:
        return int(stop.code or 0)
    registry = scan(Switches.read(no_plugin=options.no_plugin))
    records = registry.of_kind(options.kind) if options.kind else list(registry.records)
    warnings = unknown_switches(registry)
    print(
        as_json(registry, records, warnings)
        if options.json
        else as_text(registry, records, warnings)
    )
    return 0


def unknown_switches(registry: Registry) -> list[str]:
    """Warnings for switches that name nothing installed."""
    return registry.check_switches() if registry.switches.items() else []


def as_json(registry: Registry, records: list[PluginRecord], warnings: list[str]) -> str:
    """The machine-readable form."""
    import json

    return json.dumps(
        {
            "schema_version": SCHEMA_VERSION,
            "core_version": __version__,
            "plugins": [record._asdict() for record in records],
            "problems": [problem._asdict() for problem in registry.problems],
            "warnings": warnings,
        },
        indent=2,
    )


def as_text(registry: Registry, records: list[PluginRecord], warnings: list[str]) -> str:
    """A table, then one line for every record that cannot be used and every problem."""
    lines = table([COLUMNS, *(tuple(getattr(r, column) for column in COLUMNS) for r in records)])
    if not records:
        lines = ["no plugins found"]
    notes = [f"{r.describe()} is {r.state}: {r.reason}" for r in records if r.reason]
    notes += [f"skipped {problem.describe()}" for problem in registry.problems]
    notes += [f"warning: {warning}" for warning in warnings]
    return "\n".join([*lines, "", *notes] if notes else lines)


def table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows as aligned columns; the first row is the heading."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    return [padded[0], "  ".join("-" * width for width in widths), *padded[1:]]
