"""`prime plugins list | show | doctor | new | test`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from prime_rl.cli.plugins_doctor import check_installation, check_plugin
from prime_rl.cli.plugins_list import as_json, as_text
from prime_rl.plugins import Registry, Switches, scan
from prime_rl.plugins.records import Problem, ScriptClaim
from prime_rl.testing.distributions import LOSS_MODULE, write_distribution, write_loss


def prime(*arguments: str, path: Path | None = None, **environment: str):
    variables = {**os.environ, **environment}
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "prime_rl.cli.main", "plugins", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120)


def rows(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_list_of_none():
    """BL-065: the list for 0, 1 and many plugins, as JSON and as text."""
    empty = Registry((), (), (), Switches())
    assert as_text(empty, [], []) == "no plugins found"
    assert json.loads(as_json(empty, [], []))["plugins"] == []


def test_list_of_one_and_many(tmp_path):
    write_loss(tmp_path, "list_one")
    assert ["loss", "list_one", "acme-list-one", "1.0", "ok"] in rows(
        prime("list", "--kind", "loss", path=tmp_path).stdout
    )
    for index in range(20):
        write_loss(tmp_path, f"list_many_{index}")
    text = rows(prime("list", path=tmp_path).stdout)
    assert text[0] == ["kind", "name", "distribution", "version", "state"]
    assert sum(row[1].startswith("list_many_") for row in text[2:]) == 20
    assert ["launcher", "local", "prime-rl", scan().of_kind("launcher")[0].version, "ok"] in text
    report = json.loads(prime("list", "--json", path=tmp_path).stdout)
    assert sum(p["name"].startswith("list_many_") for p in report["plugins"]) == 20


def test_list_says_what_cannot_be_used_and_why(tmp_path):
    write_loss(tmp_path, "list_off")
    entries = {"prime_rl.losses": {"list_old": "m:A"}}
    write_distribution(tmp_path, "list-old", entry_points=entries, requires=["prime-rl>=99"])
    result = prime("list", "--no-plugin", "list-off", "--no-plugin", "list_of", path=tmp_path)
    assert result.returncode == 0
    assert "list_off (acme-list-off 1.0) is disabled: switched off by --no-plugin" in result.stdout
    assert "is incompatible: needs prime-rl>=99" in result.stdout
    assert "--no-plugin names 'list_of', which is not installed" in result.stdout


def test_none_leaves_core_alone(tmp_path):
    write_loss(tmp_path, "list_gone")
    states = {
        row[1]: row[4]
        for row in rows(prime("list", path=tmp_path, PRIME_PLUGINS="none").stdout)
        if len(row) == 5
    }
    assert states["list_gone"] == "disabled"
    assert states["grpo"] == "ok"


def test_show_tells_settings_recipes_capabilities_and_origin(tmp_path):
    source = LOSS_MODULE.format(name="shown", class_name="Shown").replace(
        "    Config = ShownConfig\n",
        "    Config = ShownConfig\n    capabilities = {'devices': ('cpu', 'cuda')}\n"
        "    needs = {'engine.sampling_mask': True}\n",
    )
    entries = {"prime_rl.losses": {"shown": "acme_shown:Shown"}}
    write_distribution(
        tmp_path, "acme-shown", entry_points=entries, modules={"acme_shown.__init__": source}
    )
    recipes = tmp_path / "acme_shown" / "recipes"
    recipes.mkdir()
    (recipes / "debug.toml").write_text("x = 1\n")
    text = prime("show", "shown", path=tmp_path).stdout
    assert "acme-shown 1.0" in text and "acme_shown:Shown" in text and str(tmp_path) in text
    assert "prime-rl>=0.1,<1" in text and "trainer.loss" in text
    assert ["strength", "number", "1.0", "Factor", "of", "the", "loss."] in rows(text)
    assert "devices = ['cpu', 'cuda']" in text and "engine.sampling_mask = True" in text
    assert ["debug", str(recipes / "debug.toml")] in rows(text)
    report = json.loads(prime("show", "acme-shown:shown", "--json", path=tmp_path).stdout)
    (plugin,) = report["plugins"]
    assert report["schema_version"] == 1
    assert plugin["config_schema"]["properties"]["strength"]["default"] == 1.0
    assert plugin["recipes"] == {"debug": str(recipes / "debug.toml")}


def test_show_of_a_broken_plugin_and_of_an_unknown_name(tmp_path):
    entries = {"prime_rl.losses": {"shown_bad": "acme_bad:A"}}
    write_distribution(
        tmp_path, "acme-bad", entry_points=entries, modules={"acme_bad": "raise SystemExit(0)"}
    )
    result = prime("show", "shown_bad", path=tmp_path)
    assert result.returncode == 1
    assert "acme-bad 1.0" in result.stdout and "SystemExit" in result.stdout
    unknown = prime("show", "shown_bat", path=tmp_path)
    assert unknown.returncode == 1 and "Did you mean shown_bad?" in unknown.stderr


DOCTOR_CASES = {
    "fine": (LOSS_MODULE.format(name="fine", class_name="Plugin"), "ok", ""),
    "import_error": ("import a_library_nobody_has", "error", "a_library_nobody_has"),
    "syntax_error": ("def f(:\n", "error", "SyntaxError"),
    "assertion": ("assert False, 'never'", "error", "never"),
    "system_exit": ("raise SystemExit(0)", "error", "SystemExit"),
    "attribute": ("", "error", "no attribute 'Plugin'"),
    "wrong_object": ("Plugin = 3", "error", "expected a class"),
    "dies": ("import os\nos._exit(9)", "error", "ended with code 9"),
    "crashes": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", "error", "code -11"),
    "hangs": ("import time\ntime.sleep(600)", "error", "did not load within 1 s"),
    "talks": (
        "print('{}')\n" + LOSS_MODULE.format(name="talks", class_name="Plugin"),
        "ok",
        "",
    ),
    "heavy": (
        "import numpy\n" + LOSS_MODULE.format(name="heavy", class_name="Plugin"),
        "warning",
        "importing it loads numpy",
    ),
    "constructor": (
        LOSS_MODULE.format(name="constructor", class_name="Plugin")
        + "    def __init__(self, config):\n        raise RuntimeError('no device')\n",
        "error",
        "no device",
    ),
}


@pytest.mark.parametrize("how", DOCTOR_CASES)
def test_doctor_survives_and_names_every_fault(tmp_path, monkeypatch, how):
    source, level, expected = DOCTOR_CASES[how]
    entries = {"prime_rl.losses": {how: f"doctored_{how}:Plugin"}}
    modules = {f"doctored_{how}": source}
    write_distribution(tmp_path, f"doctored-{how}", entry_points=entries, modules=modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    finding = check_plugin(scan().find("loss", how), timeout_s=1 if how == "hangs" else 60)
    assert finding.level == level, finding
    assert expected in finding.text
    if how in ("import_error", "constructor"):
        assert f"doctored_{how}.py" in finding.traceback


def test_doctor_checks_listeners_and_commands(tmp_path, monkeypatch):
    listener = "from prime_rl.api import hookimpl\n@hookimpl\ndef step_metrics(gone): ...\n"
    entries = {"prime_rl.hooks": {"ear": "doc_ear"}, "prime_rl.commands": {"cmd": "doc_ear:main"}}
    write_distribution(tmp_path, "doc", entry_points=entries, modules={"doc_ear": listener})
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    registry = scan()
    (ear,) = registry.of_kind("hook")
    (command,) = registry.of_kind("command")
    assert "gone" in check_plugin(ear, 60).text
    assert "no attribute 'main'" in check_plugin(command, 60).text


def installation(monkeypatch, *folders: Path) -> dict[str, list[str]]:
    """What doctor says from metadata alone: level -> lines."""
    for folder in reversed(folders):
        monkeypatch.syspath_prepend(str(folder))
    found: dict[str, list[str]] = {"error": [], "warning": [], "ok": [], "skipped": []}
    for finding in check_installation(scan()):
        found[finding.level].append(f"{finding.subject}: {finding.text}")
    return found


def test_doctor_reads_metadata_faults(tmp_path, monkeypatch):
    entries = {"prime_rl.losses": {"doc_a": "shared_package:A"}}
    write_distribution(tmp_path, "doc-a", entry_points=entries, requires=())
    entries = {"prime_rl.losses": {"doc_b": "shared_package:B"}}
    write_distribution(tmp_path, "doc-b", entry_points=entries)
    entries = {"prime_rl.losses": {"doc_c": "prime_rl.sneaky:C"}}
    write_distribution(tmp_path, "doc-c", entry_points=entries, requires=["prime-rl>=99"])
    for name in ("doc-d", "doc-e"):
        entries = {"prime_rl.losses": {"doc_same": f"{name.replace('-', '_')}:D"}}
        write_distribution(tmp_path, name, entry_points=entries)
    write_distribution(tmp_path, "torn", entry_points_bytes=b"[x]\nno equals\n")
    write_distribution(tmp_path / "again", "doc-a", version="7")
    found = installation(monkeypatch, tmp_path, tmp_path / "again")
    errors, warnings = "\n".join(found["error"]), "\n".join(found["warning"])
    assert "doc-a, doc-b: all use the package shared_package" in errors
    assert "doc-c: puts plugins into core's own package" in errors
    assert "incompatible: needs prime-rl>=99" in errors
    assert "conflicting: the name is also used by doc-e:doc_same" in errors
    assert "torn" in errors and "line 2" in errors
    assert "a second copy, ignored" in warnings
    assert "loss doc_a (doc-a 1.0): does not say which prime-rl it needs" in warnings


def test_doctor_reports_a_stolen_script(tmp_path, monkeypatch):
    """Another distribution on the index installs a script called prime too; the later one wins."""
    ours = ScriptClaim("prime", "prime-rl", "prime_rl.cli.main:main")
    theirs = ScriptClaim("prime", "prime", "elsewhere:main")
    (tmp_path / "python").touch()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))

    def finding(text: str, *claims: ScriptClaim):
        (tmp_path / "prime").write_text(text)
        registry = Registry((), (), claims, Switches())
        return next(f for f in check_installation(registry) if f.subject == "script prime")

    ours_text = "from prime_rl.cli.main import main\n"
    assert finding(ours_text, ours).level == "ok"
    assert finding(ours_text, ours, theirs).level == "warning"
    stolen = finding("from elsewhere import main\n", ours, theirs)
    assert stolen.level == "error"
    assert "belongs to prime, not to prime-rl; use prime-rl instead" in stolen.text


def test_doctor_command_ends_with_1_when_something_is_wrong(tmp_path):
    write_distribution(tmp_path, "torn", entry_points_bytes=b"[x]\nno equals\n")
    result = prime("doctor", "--json", path=tmp_path, PRIME_PLUGINS="none")
    report = json.loads(result.stdout)
    assert result.returncode == 1
    assert report["schema_version"] == 1 and report["errors"] >= 1
    assert any("torn" in finding["subject"] for finding in report["findings"])


def test_problem_without_a_plugin_is_told_in_text():
    registry = Registry((), (Problem("torn", "/x", "line 2"),), (), Switches())
    assert as_text(registry, [], []) == "no plugins found\n\nskipped torn at /x: line 2"


def test_test_runs_the_kit_and_reports_its_verdict(tmp_path):
    write_loss(tmp_path, "kit_sloppy")
    source = (tmp_path / "acme_kit_sloppy.py").read_text().replace("-self.config", "self.config")
    (tmp_path / "acme_kit_sloppy.py").write_text(source)
    result = prime("test", "kit_sloppy", path=tmp_path)
    assert "LossConformance" in result.stdout
    assert result.returncode == 1
    assert "test_rewarded_tokens_become_likelier" in result.stdout
    assert "1 failed" in result.stdout, result.stdout


def test_test_of_something_without_a_kit(tmp_path):
    write_distribution(tmp_path, "ear", entry_points={"prime_rl.hooks": {"ear": "ear"}})
    result = prime("test", "ear", path=tmp_path)
    assert result.returncode == 1 and "no kit" in result.stderr
