"""The built wheels, installed into an empty environment, give a working `prime run`."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch
from build_wheels import build, distributions
from tiny_run import write_recipe


def run(*command: str | Path, timeout_s: float = 600.0) -> str:
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=timeout_s)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_quickstart_from_wheels(tmp_path):
    wheels = tmp_path / "dist"
    wheels.mkdir()
    for folder in distributions():
        build(folder, wheels)
    assert len(list(wheels.glob("*.whl"))) == len(distributions())
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / "bin" / "python"
    pins = tmp_path / "pins.txt"
    pins.write_text(f"torch=={torch.__version__.split('+')[0]}\n")
    run(
        *(python, "-m", "pip", "install", "-q", "-c", pins),
        *("--find-links", wheels, "prime-rl[quickstart]"),
    )
    listed = run(tmp_path / "empty" / "bin" / "prime", "plugins", "list")
    for name in ("qwen3", "ipo", "filesystem", "sticky", "embedded", "grpo"):
        assert name in listed
    output = run(tmp_path / "empty" / "bin" / "prime-rl", "run", write_recipe(tmp_path))
    assert "Held-out results" in output
    assert "site-packages" in run(python, "-c", "import prime_rl; print(prime_rl.__file__)")
    assert sys.prefix not in run(python, "-c", "import sys; print(sys.prefix)")
