"""Sizes, names and the workspace's lists: what keeps the house readable."""

from __future__ import annotations

import ast
import re
import subprocess
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 100
FORBIDDEN_NAMES = {"utils", "helpers", "common", "misc"}
TOP_LEVEL = {
    *("core", "plugins", "model_plugins", "loss_plugins", "kernel_plugins", "transport_plugins"),
    *("tests", "docs", ".ci"),
}


def tracked_files(pattern: str = "*") -> list[Path]:
    listing = subprocess.run(
        ["git", "ls-files", pattern], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return [ROOT / line for line in listing.stdout.splitlines() if (ROOT / line).is_file()]


def long_functions(source: str) -> list[tuple[str, int]]:
    return [
        (node.name, length)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def distribution_folders() -> list[str]:
    files = [p for p in tracked_files("*pyproject.toml") if p.parent != ROOT]
    return sorted(p.parent.relative_to(ROOT).as_posix() for p in files)


def test_files_and_functions_stay_short():
    files = tracked_files("*.py")
    assert len(files) > 40
    too_long = [
        str(f.relative_to(ROOT)) for f in files if f.read_text().count("\n") > MAX_FILE_LINES
    ]
    assert too_long == []
    functions = [(f.name, *hit) for f in files for hit in long_functions(f.read_text())]
    assert functions == []


def test_the_function_check_can_fail():
    body = "\n".join("    pass" for _ in range(MAX_FUNCTION_LINES))
    assert long_functions(f"def too_long():\n{body}\n") == [("too_long", 101)]


def test_every_module_says_what_it_is_for():
    silent = [
        str(f.relative_to(ROOT))
        for f in tracked_files("*.py")
        if not ast.get_docstring(ast.parse(f.read_text()))
    ]
    assert silent == []


def test_no_drawer_names_and_no_new_rooms():
    paths = [f.relative_to(ROOT) for f in tracked_files()]
    assert [str(p) for p in paths if {p.stem, *p.parts} & FORBIDDEN_NAMES] == []
    assert {p.parts[0] for p in paths if len(p.parts) > 1} <= TOP_LEVEL


def test_lists_of_distributions_agree():
    folders = distribution_folders()
    editable = (ROOT / "tests" / "editable.txt").read_text().splitlines()
    assert sorted(line.removeprefix("-e ./").split("[")[0] for line in editable) == folders
    workspace = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    listed = sorted(re.search(r"\{root:uri\}/(.+)$", line)[1] for line in workspace)
    assert listed == folders


def test_every_extra_names_a_distribution_of_this_repository():
    core = tomllib.loads((ROOT / "core" / "pyproject.toml").read_text())["project"]
    ours = {
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"]
        for folder in distribution_folders()
    }
    for extra, requirements in core["optional-dependencies"].items():
        for requirement in requirements:
            name = re.match(r"[a-z0-9-]+", requirement)[0]
            if name.startswith("prime-rl"):
                assert name in ours, f"extra {extra} names {name}, which is not built here"


def test_core_knows_no_model_family():
    pattern = re.compile(r"deepseek|glm[-_]?5|nemotron|qwen", re.IGNORECASE)
    hits = [
        f"{f.relative_to(ROOT)}:{number}"
        for f in tracked_files("core/src/*")
        for number, line in enumerate(f.read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]
    assert hits == []
