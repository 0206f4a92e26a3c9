"""The documentation is true: commands run, snippets work, links resolve, fields exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import docs_pages
import pytest
from docs_pages import ROOT, Block, Command
from test_import_rules import ALLOWED

from prime_rl.cli.main import COMMANDS
from prime_rl.configs.load import load_run
from prime_rl.configs.schema import run_schema
from prime_rl.plugins import KINDS, scan
from prime_rl.testing.distributions import write_distribution

PAGES = docs_pages.pages()
BLOCKS = {page: docs_pages.blocks(page) for page in PAGES}
LANGUAGES = {"console", "toml", "python", "text", "json"}
PRIME = [sys.executable, "-m", "prime_rl.cli.main"]
TIMEOUT_S = {False: 60.0, True: 600.0}
"""Seconds that one command may take: ordinary, slow."""


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def all_blocks(language: str, mark: str | None = None) -> list[Block]:
    return [
        block
        for found in BLOCKS.values()
        for block in found
        if block.language == language and (mark is None or mark in block.marks)
    ]


# Form


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_page_is_well_formed(page):
    for block in BLOCKS[page]:
        assert block.language in LANGUAGES, f"{block.place}: language {block.language!r}"
        assert set(block.marks) <= docs_pages.MARKS, f"{block.place}: marks {block.marks}"
        if block.language == "console":
            assert list(block.commands())
        if block.language == "toml":
            tomllib.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_resolve(page):
    for link in docs_pages.links(page):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{name_of(page)} links to {link}"
        if anchor:
            assert anchor in docs_pages.anchors(target), f"{name_of(page)} links to {link}"


def test_every_documentation_page_can_be_reached_from_the_readme():
    reached, left = set(), [ROOT / "README.md"]
    while left:
        page = left.pop()
        if page in reached or page.suffix != ".md":
            continue
        reached.add(page)
        targets = (link.partition("#")[0] for link in docs_pages.links(page))
        left += [(page.parent / t).resolve() for t in targets if t and "://" not in t]
    assert [name_of(page) for page in PAGES if page not in reached] == []


def test_every_kind_has_a_page():
    pages = {page.stem for page in (ROOT / "docs" / "plugins").glob("*.md")}
    kinds = {record.kind for record in scan().records if record.kind in KINDS}
    assert {kind for kind in kinds if kind not in pages} == set()


def test_no_page_names_this_machine_or_a_person():
    pattern = re.compile(r"/home/\w|/tmp/\w|/work\b|/Users/|C:\\")
    assert [name_of(page) for page in PAGES if pattern.search(page.read_text())] == []


# Commands


def run_command(command: Command, folder: Path, is_slow: bool) -> subprocess.CompletedProcess[str]:
    """Run `prime ...` as a user does, in `folder`."""
    assert command.words[0] == "prime", f"mark what {command.words[0]} needs"
    environment = {key: v for key, v in os.environ.items() if key != "PRIME_PLUGINS"}
    environment |= {"OMP_NUM_THREADS": "1", "COLUMNS": "160", **command.environment}
    return subprocess.run(
        [*PRIME, *command.words[1:]],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S[is_slow],
    )


def missing_output(shown: Iterable[str], printed: str) -> list[str]:
    """Shown lines that were not printed, in order; `...` stands for anything."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    missing = []
    for line in shown:
        parts = [re.escape(" ".join(part.split())) for part in line.split("...")]
        pattern = re.compile(r".*".join(parts).strip())
        if line.strip() != "..." and not any(pattern.fullmatch(found.strip()) for found in lines):
            missing.append(line)
    return missing


def run_blocks(blocks: list[Block], folder: Path, is_slow: bool) -> None:
    for block in blocks:
        for command in block.commands():
            done = run_command(command, folder, is_slow)
            printed = done.stdout + done.stderr
            about = f"{block.place}: {' '.join(command.words)}\n{printed}"
            assert done.returncode == int(block.marks.get("exit", 0)), about
            assert "Traceback" not in printed, about
            assert missing_output(command.output, printed) == [], about


def write_files(page: Path, folder: Path) -> None:
    for block in BLOCKS[page]:
        if "file" in block.marks:
            path = folder / block.marks["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text)


def runnable(page: Path, is_slow: bool) -> list[Block]:
    return [
        block
        for block in BLOCKS[page]
        if block.language == "console"
        and "needs" not in block.marks
        and ("slow" in block.marks) == is_slow
    ]


def snippets(page: Path, is_slow: bool) -> list[Block]:
    return [
        block
        for block in BLOCKS[page]
        if block.language == "python"
        and block.text.startswith("# tested")
        and ("slow" in block.marks) == is_slow
    ]


def run_snippets(blocks: list[Block]) -> None:
    """One after the other, as one program."""
    namespace: dict[str, Any] = {"__name__": "snippet"}
    for block in blocks:
        exec(compile(block.text, block.place, "exec"), namespace)


@pytest.mark.parametrize("page", [p for p in PAGES if runnable(p, False)], ids=name_of)
def test_commands(page, tmp_path):
    write_files(page, tmp_path)
    run_blocks(runnable(page, False), tmp_path, is_slow=False)


@pytest.mark.parametrize("page", [p for p in PAGES if snippets(p, False)], ids=name_of)
def test_snippets(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_snippets(snippets(page, False))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [p for p in PAGES if runnable(p, True) or snippets(p, True)], ids=name_of
)
def test_slow_commands_then_slow_snippets(page, tmp_path, monkeypatch):
    write_files(page, tmp_path)
    run_blocks(runnable(page, True), tmp_path, is_slow=True)
    monkeypatch.chdir(tmp_path)
    run_snippets(snippets(page, True))


def problem_with(words: list[str]) -> str:
    """Why a command that is not run here cannot be right; "" when it may be."""
    program, *rest = words
    if program == "prime":
        return "" if rest[0] in {command.name for command in COMMANDS} else f"no command {rest[0]}"
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
        return "" if set(rest) <= set(targets) else f"no target {rest}"
    if program in ("python", "pytest"):
        paths = [word for word in rest if "/" in word and not word.startswith(("-", "."))]
        missing = [path for path in paths if not (ROOT / path).exists()]
        return f"no file {missing}" if missing else ""
    return "" if program in ("pip", "git", "cd", "curl", "torchrun") else f"unknown: {program}"


def test_commands_that_need_something_exist():
    blocks = all_blocks("console", "needs")
    assert len(blocks) > 5
    for block in blocks:
        assert block.marks["needs"], f"{block.place}: say what is needed"
        for command in block.commands():
            assert problem_with(command.words) == "", block.place


def test_the_command_checks_can_fail():
    assert problem_with(["make", "coffee"]) and problem_with(["prime", "rnu"])
    assert problem_with(["pytest", "loss_plugins/none"]) and problem_with(["bash", "x"])
    assert missing_output(["a ... c", "e"], "a b c\nd") == ["e"]
    assert missing_output(["a   b"], " a b ") == []


# Configuration


def test_every_fragment_of_a_recipe_fits(tmp_path):
    blocks = [
        block for block in all_blocks("toml") if not {"file", "not a recipe"} & set(block.marks)
    ]
    assert len(blocks) > 8
    registry = scan()
    for number, block in enumerate(blocks):
        path = tmp_path / f"fragment_{number}.toml"
        path.write_text(block.text)
        is_whole = "max_steps" in block.text
        load_run(["@", str(path)] if is_whole else ["quickstart", "@", str(path)], registry)


SCHEMA = run_schema(scan())
NOT_FIELDS = re.compile(r".*\.(json|jsonl|toml|md|png|py|log|bin|url|address|safetensors|done|gz)")


def has_field(name: str) -> bool:
    """Whether a dotted name is a field of a run, of any stage, or of an installed plugin."""
    parts = [part for part in name.split(".") if not part.isdecimal()]
    defs = SCHEMA["$defs"]
    starts = [SCHEMA, defs["RLConfig"], defs["SFTConfig"]]
    if parts[0] == "stages":
        starts, parts = starts[1:], parts[1:]
    return any(_has(start, parts) for start in starts)


def _has(schema: dict[str, Any], parts: list[str]) -> bool:
    if not parts:
        return True
    if "$ref" in schema:
        target = schema["$ref"].removeprefix("#/$defs/")
        return _has(SCHEMA["$defs"][target.replace("~1", "/")], parts)
    if parts[0] in schema.get("properties", {}):
        return _has(schema["properties"][parts[0]], parts[1:])
    inner = [*schema.get("anyOf", ()), *schema.get("oneOf", ()), *schema.get("allOf", ())]
    inner += [schema["items"]] if "items" in schema else []
    if schema.get("type") == "object" and schema.get("additionalProperties") is True:
        return True
    return any(_has(one, parts) for one in inner)


ROOTS = {*SCHEMA["properties"], *SCHEMA["$defs"]["RLConfig"]["properties"]}
ROOTS |= set(SCHEMA["$defs"]["SFTConfig"]["properties"])


def field_names(page: Path) -> set[str]:
    """Names in backticks that look like fields of a run: `orchestrator.batch_size`."""
    dotted = {n for n in docs_pages.code_names(page) if re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", n)}
    return {n for n in dotted if n.split(".")[0] in ROOTS and not NOT_FIELDS.fullmatch(n)}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_field_exists(page):
    assert sorted(name for name in field_names(page) if not has_field(name)) == []


def test_configuration_page_names_fields_and_nothing_else():
    page = ROOT / "docs" / "configuration.md"
    assert len(field_names(page)) > 20
    dotted = {n for n in docs_pages.code_names(page) if re.fullmatch(r"[a-z_]+(\.[a-z0-9_]+)+", n)}
    unknown = {n for n in dotted - field_names(page) if not NOT_FIELDS.fullmatch(n)}
    assert {n for n in unknown if not n.startswith("prime_rl")} == set()


def test_the_field_check_can_fail():
    assert has_field("orchestrator.train.source.group_size")
    assert has_field("trainer.loss.eps") and has_field("run.name") and has_field("data.batch_size")
    assert not has_field("orchestrator.batch_sise") and not has_field("trainer.loss.epsilon")


# Plugins


@pytest.fixture(scope="module")
def documented_plugins(tmp_path_factory) -> tuple[Path, list[tuple[str, str]]]:
    """Every plugin that a page shows, installed in a folder of its own: (folder, kinds and names)."""
    site = tmp_path_factory.mktemp("site")
    found = []
    for block in all_blocks("python", "plugin"):
        kind, name, class_name = block.marks["plugin"].split()
        module = f"prime_rl_{KINDS[kind].word}_{name}"
        write_distribution(
            site,
            module.replace("_", "-"),
            entry_points={KINDS[kind].group: {name: f"{module}:{class_name}"}},
            modules={module: block.text},
        )
        found.append((kind, name))
    return site, found


def with_site(site: Path) -> dict[str, str]:
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


LOAD = """
import sys
from prime_rl.plugins import scan
registry = scan()
for item in sys.argv[1:]:
    kind, name = item.split(":")
    registry.load(kind, name)(registry.config_class(kind, name)(type=name))
assert not {"torch", "numpy", "transformers"} & set(sys.modules)
print("loaded", len(sys.argv) - 1)
"""


def test_plugins_on_pages_load_without_torch(documented_plugins):
    site, plugins = documented_plugins
    assert len(plugins) >= 5
    names = [f"{kind}:{name}" for kind, name in plugins]
    done = subprocess.run(
        [sys.executable, "-c", LOAD, *names], env=with_site(site), capture_output=True, text=True
    )
    assert done.stdout == f"loaded {len(plugins)}\n", done.stderr


@pytest.mark.slow
def test_plugins_on_pages_pass_the_kits_on_pages(documented_plugins, tmp_path):
    site, plugins = documented_plugins
    kits = all_blocks("python", "kit")
    assert {tuple(kit.marks["kit"].split()) for kit in kits} <= set(plugins)
    for kit in kits:
        kind, name = kit.marks["kit"].split()
        (tmp_path / f"test_{kind}_{name}.py").write_text(kit.text)
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, str(tmp_path), str(tmp_path)],
        env=with_site(site),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# The loss of the README


README_VALUE = """
import torch
from prime_rl.api import LossInputs
from prime_rl.plugins import scan
registry = scan()
config = registry.config_class("loss", "clip")(type="clip", clip_low=0.2, clip_high=0.3)
loss = registry.load("loss", "clip")(config)
output = loss.compute(LossInputs(
    trainer_logprobs=torch.tensor([0.0, 0.0, -0.1, -1.0]),
    inference_logprobs=torch.tensor([-0.5, -0.5, -0.1, 0.0]),
    advantages=torch.tensor([1.0, -1.0, 2.0, -1.0]),
    segment_ids=torch.zeros(4, dtype=torch.int64),
))
print([round(value, 4) for value in output.loss.tolist()], output.keep.tolist())
print(loss.__module__, registry.find("loss", "clip").distribution)
"""


def test_the_readme_loss_is_a_working_wheel_of_forty_lines(tmp_path):
    files = {b.marks["file"]: b for b in BLOCKS[ROOT / "README.md"] if "file" in b.marks}
    module = files["prime_rl_loss_clip.py"]
    assert len(module.text.splitlines()) <= 40
    write_files(ROOT / "README.md", tmp_path)
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    pip = [sys.executable, "-m", "pip"]
    quiet = ["--quiet", "--no-deps", "--disable-pip-version-check"]
    build = [*pip, "wheel", *quiet, "--no-build-isolation", "-w", str(wheels), str(tmp_path)]
    subprocess.run(build, check=True)
    (wheel,) = wheels.glob("*.whl")
    install = [*pip, "install", *quiet, "--no-index", "--target", str(site), str(wheel)]
    subprocess.run(install, check=True)
    done = subprocess.run(
        [sys.executable, "-c", README_VALUE], env=with_site(site), capture_output=True, text=True
    )
    # Ratios e^0.5 = 1.6487, e^0.5, 1, e^-1 = 0.3679; bounds 0.8 and 1.3.
    # -min(1.6487, 1.3); -min(-1.6487, -1.3); -min(2, 2); -min(-0.3679, -0.8)
    assert done.stdout.splitlines() == [
        "[-1.3, 1.6487, -2.0, 0.8] [False, True, True, False]",
        "prime_rl_loss_clip prime-rl-loss-clip",
    ], done.stderr


# The rooms


def test_the_table_of_arrows_is_the_tested_one():
    page = (ROOT / "docs" / "architecture.md").read_text()
    section = page.split("## Rooms and arrows")[1]
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, flags=re.MULTILINE)
    shown = {room: set(re.findall(r"`(\w+)`", cells)) for room, cells in rows}
    assert shown == {
        room: rooms - {"__init__"} for room, rooms in ALLOWED.items() if room[0] != "_"
    }


def test_every_benchmark_is_on_its_page_and_the_other_way_round():
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    shown = {name for name in re.findall(r"tests/benchmarks/(bench_\w+\.py)", page)}
    listing = ["git", "ls-files", "tests/benchmarks/bench_*.py"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True)
    present = {Path(line).name for line in tracked.stdout.splitlines()}
    assert shown == present, "docs/benchmarks.md has a row for every benchmark"
    for command in re.findall(r"`((?:pytest|python) [^`]+)`", page):
        assert problem_with(command.split()) == "", command
