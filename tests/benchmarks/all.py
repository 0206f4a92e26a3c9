"""Runs every benchmark of this folder that needs no accelerator, one after the other."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def main() -> int:
    """The number of benchmarks that failed."""
    failed = 0
    for script in sorted(FOLDER.glob("bench_*.py")):
        if script.stem.endswith("_gpu"):
            continue
        print(f"\n== {script.name}", flush=True)
        started = time.monotonic()
        code = subprocess.run([sys.executable, str(script)], check=False).returncode
        print(f"== {script.name}: exit code {code}, {time.monotonic() - started:.0f} s", flush=True)
        failed += code != 0
    return failed


if __name__ == "__main__":
    sys.exit(main())
