"""Builds the wheel of every distribution into one folder: `python tests/build_wheels.py dist`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def distributions() -> list[Path]:
    """Folders of all distributions, as tests/editable.txt lists them."""
    lines = (ROOT / "tests" / "editable.txt").read_text().splitlines()
    return [ROOT / line.removeprefix("-e ./").split("[")[0] for line in lines if line]


def build(folder: Path, target: Path) -> None:
    """Build one wheel; raises CalledProcessError with pip's own message on failure."""
    subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"),
            *("-w", str(target), str(folder)),
        ],
        check=True,
    )


def main() -> None:
    """Build everything."""
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    target.mkdir(parents=True, exist_ok=True)
    for folder in distributions():
        build(folder, target)


if __name__ == "__main__":
    main()
