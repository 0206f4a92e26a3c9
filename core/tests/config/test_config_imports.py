"""Configuration stays light: a whole recipe is loaded and described without torch."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import contextlib, io, sys
from prime_rl.cli.config import command
from prime_rl.configs.help import field_help
from prime_rl.plugins import scan
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    command(["schema"])
    command(["show", sys.argv[1]])
    command(["validate", sys.argv[1]])
    field_help(None, scan())
print([name for name in ("torch", "numpy", "transformers", "verifiers") if name in sys.modules])
"""


def test_no_heavy_module_is_imported(tmp_path, flat):
    (tmp_path / "recipe.toml").write_text(flat)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "recipe.toml")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout == "[]\n"
