"""Start-up time of `prime --help` and `prime plugins list` with about 130 installed distributions.

    python tests/benchmarks/bench_cli_startup.py [--runs 20] [--check]

Budget: 150 ms wall and 100 ms CPU, medians on a quiet machine with 2 cores.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from prime_rl.testing.distributions import write_distribution, write_loss

DISTRIBUTIONS = 130
WALL_BUDGET_MS = 150.0
CPU_BUDGET_MS = 100.0
COMMANDS = (["--help"], ["plugins", "list"], ["plugins", "list", "--json"])
HEAVY = "import torch, numpy, transformers\n"


def fill(folder: Path) -> int:
    """Add distributions until there are DISTRIBUTIONS: every tenth a plugin that imports torch."""
    present = len(list(importlib.metadata.distributions()))
    for index in range(max(DISTRIBUTIONS - present, 10)):
        if index % 10 == 0:
            module = write_loss(folder, f"filler_{index}")
            source = folder / f"{module}.py"
            source.write_text(HEAVY + source.read_text())
        else:
            entry_points = {"console_scripts": {f"filler{index}": "filler:main"}}
            write_distribution(folder, f"filler-{index}", entry_points=entry_points)
    return present + max(DISTRIBUTIONS - present, 10)


def measure(arguments: list[str], folder: Path, runs: int) -> tuple[float, float]:
    """Median (wall ms, CPU ms) of the program as the console script runs it."""
    program = "import sys; from prime_rl.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    walls, cpus = [], []
    for _ in range(runs + 1):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        start = time.perf_counter()
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        walls.append(1e3 * (time.perf_counter() - start))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpus.append(1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return statistics.median(walls[1:]), statistics.median(cpus[1:])  # the first one compiles


def main() -> int:
    """Print a table; with --check, exit code 1 when a figure is over the budget."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=20, help="timed runs per command")
    parser.add_argument("--check", action="store_true", help="fail when over the budget")
    options = parser.parse_args()
    over = False
    with tempfile.TemporaryDirectory() as folder:
        count = fill(Path(folder))
        print(f"{count} distributions, median of {options.runs} runs")
        print(f"{'command':<32}{'wall ms':>10}{'CPU ms':>10}")
        for arguments in COMMANDS:
            wall_ms, cpu_ms = measure(arguments, Path(folder), options.runs)
            over |= wall_ms > WALL_BUDGET_MS or cpu_ms > CPU_BUDGET_MS
            print(f"{'prime ' + ' '.join(arguments):<32}{wall_ms:>10.0f}{cpu_ms:>10.0f}")
    print(f"budget: {WALL_BUDGET_MS:.0f} ms wall, {CPU_BUDGET_MS:.0f} ms CPU")
    return int(over and options.check)


if __name__ == "__main__":
    sys.exit(main())
