"""`prime plugins doctor`: loads every plugin in a child process and checks the installation."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from prime_rl import __version__
from prime_rl.plugins import PluginRecord, Registry, scan
from prime_rl.plugins.records import CONFLICTING, CORE_DISTRIBUTION, DISABLED, OK

SCHEMA_VERSION = 1
ERROR, WARNING, FINE, SKIPPED = "error", "warning", "ok", "skipped"

app = typer.Typer(rich_markup_mode=None, add_completion=False)


class Finding(NamedTuple):
    """One line of the report."""

    level: str
    """error, warning, ok or skipped; errors decide the exit code."""
    subject: str
    text: str = ""
    traceback: str = ""


@app.command()
def doctor(
    timeout_s: Annotated[
        float, typer.Option("--timeout-s", min=0.1, help="Seconds one plugin may take to load.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Load every plugin in a child process and check the installation. Exit code 1 on an error."""
    registry = scan()
    findings = [*check_installation(registry), *check_plugins(registry, timeout_s)]
    errors = sum(finding.level == ERROR for finding in findings)
    if as_json:
        report = {
            "schema_version": SCHEMA_VERSION,
            "core_version": __version__,
            "errors": errors,
            "findings": [finding._asdict() for finding in findings],
        }
        typer.echo(json.dumps(report, indent=2))
    else:
        for finding in findings:
            typer.echo(as_text(finding))
        warnings = sum(finding.level == WARNING for finding in findings)
        typer.echo(f"\n{errors} error(s), {warnings} warning(s)")
    if errors:
        raise typer.Exit(1)


def as_text(finding: Finding) -> str:
    """The finding, with the plugin's traceback below it."""
    line = f"{finding.level:<8} {finding.subject}"
    if finding.text:
        line += f": {finding.text}"
    trace = "".join(f"\n           {row}" for row in finding.traceback.splitlines())
    return line + trace


def check_installation(registry: Registry) -> Iterator[Finding]:
    """What metadata alone tells: broken files, copies, names, version ranges, packages, scripts."""
    for problem in registry.problems:
        level = WARNING if problem.is_harmless else ERROR
        yield Finding(level, f"{problem.distribution} at {problem.location}", problem.reason)
    for record in registry.records:
        if record.state == DISABLED:
            yield Finding(SKIPPED, record.describe(), record.reason)
        elif record.state != OK:
            yield Finding(ERROR, record.describe(), f"{record.state}: {record.reason}")
        elif not record.requires_core and not record.is_core:
            text = "does not say which prime-rl it needs; add prime-rl>=X.Y,<Z to its dependencies"
            yield Finding(WARNING, record.describe(), text)
    yield from _check_packages(registry)
    for script in ("prime", "prime-rl"):
        yield from _check_script(registry, script)


def check_plugins(registry: Registry, timeout_s: float) -> list[Finding]:
    """Load each usable plugin in a child process of its own."""
    records = [record for record in registry.records if record.state in (OK, CONFLICTING)]
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as pool:
        return list(pool.map(lambda record: check_plugin(record, timeout_s), records))


def check_plugin(record: PluginRecord, timeout_s: float) -> Finding:
    """Load one plugin in a child process; it may crash, exit or hang there."""
    command = [sys.executable, "-m", "prime_rl.plugins.check", record.kind, record.qualified_name]
    subject = record.describe()
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return Finding(ERROR, subject, f"did not load within {timeout_s:g} s")
    try:
        result = json.loads(child.stdout)
    except json.JSONDecodeError:
        text = f"the process that loaded it ended with code {child.returncode}"
        return Finding(ERROR, subject, text, child.stderr[-2000:])
    if result["error"]:
        reason = result["error"].removeprefix(f"{subject} is installed but cannot be used: ")
        return Finding(ERROR, subject, reason, result["traceback"])
    if result["warning"]:
        return Finding(WARNING, subject, result["warning"])
    return Finding(FINE, subject)


def _check_packages(registry: Registry) -> Iterator[Finding]:
    """Plugins need a top-level package of their own: two owners of one hide each other's files."""
    owners: dict[str, set[str]] = {}
    for record in registry.records:
        package = record.target.partition(":")[0].partition(".")[0]
        owners.setdefault(package, set()).add(record.distribution)
    for package, distributions in sorted(owners.items()):
        if package == "prime_rl":
            distributions = distributions - {CORE_DISTRIBUTION}
            text = "puts plugins into core's own package prime_rl; use a package of its own"
            for distribution in sorted(distributions):
                yield Finding(ERROR, distribution, text)
        elif len(distributions) > 1:
            text = f"all use the package {package}; each needs one of its own"
            yield Finding(ERROR, ", ".join(sorted(distributions)), text)


def _check_script(registry: Registry, script: str) -> Iterator[Finding]:
    """Whether the script is ours; the later install wins silently."""
    others = sorted(
        {c.distribution for c in registry.scripts if c.script == script} - {CORE_DISTRIBUTION}
    )
    beside = Path(sys.executable).parent / script
    path = str(beside) if beside.exists() else shutil.which(script)
    subject = f"script {script}"
    if path is None:
        yield Finding(WARNING, subject, "is not on the PATH; use python -m prime_rl.cli.main")
    elif "prime_rl.cli.main" not in Path(path).read_text(errors="replace"):
        owner = ", ".join(others) or "something else"
        text = f"{path} belongs to {owner}, not to prime-rl; use prime-rl instead"
        yield Finding(ERROR, subject, text)
    elif others:
        text = f"{path} is ours, but {', '.join(others)} installs one too and may replace it"
        yield Finding(WARNING, subject, text)
    else:
        yield Finding(FINE, subject, path)
