"""A third party's plugins: scaffolded, built into wheels, installed in a folder beside ours."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.testing.scaffold import write_plugin


@dataclass(frozen=True)
class ThirdParty:
    """What `install_third_party` made."""

    repositories: tuple[Path, ...]
    """One folder per plugin, as `prime plugins new` writes it."""
    site: Path
    """Where the wheels are installed; put it in front of PYTHONPATH to have the plugins."""

    def environment(self) -> dict[str, str]:
        """This process's environment with the plugins beside everything that is installed."""
        paths = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH")])]
        one_thread = {"OMP_NUM_THREADS": "1"}  # toys are faster without a second one
        return {**os.environ, **one_thread, "PYTHONPATH": os.pathsep.join(paths)}

    def run(self, *command: str, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
        """Run a Python command line (`-m prime_rl.cli.main plugins list`) with the plugins."""
        return subprocess.run(
            [sys.executable, *command],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )


def install_third_party(folder: Path, plugins: Mapping[str, Sequence[str]]) -> ThirdParty:
    """Write, build and install plugins: kind -> names. Needs flit_core and pip, no network.

    Raises RuntimeError with pip's output when a repository does not build.
    """
    repositories = tuple(
        write_plugin(kind, name, folder / "repositories")
        for kind, names in plugins.items()
        for name in names
    )
    wheels, site = folder / "wheels", folder / "site"
    _pip("wheel", "--no-build-isolation", "-w", str(wheels), *map(str, repositories))
    built = sorted(str(path) for path in wheels.glob("*.whl"))
    _pip("install", "--no-index", "--target", str(site), *built)
    return ThirdParty(repositories, site)


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", arguments[0], "--quiet", "--no-deps", *arguments[1:]]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
