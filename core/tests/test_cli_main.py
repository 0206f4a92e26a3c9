"""`prime`: help from tables and metadata, one command imported, errors without tracebacks."""

import importlib.util
import json
import os
import resource
import subprocess
import sys

import pytest

from prime_rl import __version__
from prime_rl.cli import main as cli_main
from prime_rl.cli import plugins as cli_plugins
from prime_rl.testing.distributions import write_distribution, write_loss

FORBIDDEN = [
    "torch",
    "triton",
    "numpy",
    "pydantic",
    "stevedore",
    "transformers",
    "vllm",
    "verifiers",
    "typer",
    "rich",
]


def prime(*arguments: str, path=None, **environment: str) -> subprocess.CompletedProcess:
    """Run the program in a child, with `path` in front of everything installed."""
    variables = {**os.environ, **environment}
    variables.pop("PRIME_PLUGINS", None)
    variables.update(environment)
    if path is not None:
        variables["PYTHONPATH"] = str(path)
    command = [sys.executable, "-m", "prime_rl.cli.main", *arguments]
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)


def test_help_lists_every_command_in_one_line():
    result = prime("--help")
    assert result.returncode == 0 and not result.stderr
    for command in cli_main.COMMANDS:
        (line,) = [x for x in result.stdout.splitlines() if x.startswith(f"  {command.name} ")]
        assert command.help in line
    assert result.stdout == prime().stdout == prime("-h").stdout


def test_every_command_of_core_exists():
    for command in (*cli_main.COMMANDS, *cli_plugins.COMMANDS):
        assert importlib.util.find_spec(command.target), command.target


def test_version():
    assert prime("--version").stdout == f"prime-rl {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["rum"], "no such command: rum. Did you mean run?"),
        (["--halp"], "no such option: --halp"),
        (["plugins", "lost"], "no such command: prime plugins lost"),
        (["plugins", "list", "--kind", "lass"], "invalid choice"),
        (["plugins", "show"], "Missing argument"),
    ],
)
def test_wrong_use_is_exit_code_2(arguments, expected):
    result = prime(*arguments)
    assert result.returncode == 2
    assert expected in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plugins", "list"], ["plugins", "list", "--json"]]
)
def test_help_and_list_import_neither_libraries_nor_plugins(tmp_path, arguments):
    """BL-064"""
    write_loss(tmp_path, "cli_present")
    write_distribution(
        tmp_path,
        "acme-tool",
        entry_points={
            "prime_rl.commands": {"cli-tool": "acme_tool:main"},
            "prime_rl.hooks": {"ear": "acme_tool"},
        },
        modules={"acme_tool": "import torch\n"},
    )
    code = (
        "import sys\nfrom prime_rl.cli.main import main\n"
        f"main({arguments!r})\n"
        "print('MODULES', *sorted(sys.modules))"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    child = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    *output, modules = child.stdout.splitlines()
    loaded = {name.partition(".")[0] for name in modules.split()[1:]}
    assert any("cli" in line for line in output)
    assert not loaded & {*FORBIDDEN, "acme_tool", "acme_cli_present"}
    assert not {name for name in loaded if name.startswith("prime_rl_")}
    assert "prime_rl" in loaded


@pytest.mark.parametrize("arguments", [["--help"], ["plugins", "list"]])
def test_start_up_stays_within_100_ms_of_cpu(arguments):
    """The best of several: other work on the machine only adds. The benchmark has the medians."""
    best = 1e9
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert prime(*arguments).returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        best = min(best, 1000 * spent)
    assert best <= 100, f"{best:.0f} ms"


COMMAND = """
import pathlib, sys
pathlib.Path(__file__).with_suffix(".imported").touch()

def main(arguments):
    print("hello", *arguments)
    return 7
"""

BROKEN_COMMANDS = {
    "import_error": ("import a_library_nobody_has", "a_library_nobody_has"),
    "syntax_error": ("def main(:\n", "SyntaxError"),
    "system_exit": ("raise SystemExit(0)", "SystemExit"),
    "assertion": ("assert False, 'never'", "never"),
    "attribute": ("", "no attribute 'main'"),
}


def test_command_of_a_plugin_is_listed_unimported_and_run_when_invoked(tmp_path):
    for name in ("hello", "other"):
        write_distribution(
            tmp_path,
            f"acme-{name}",
            entry_points={"prime_rl.commands": {f"say-{name}": f"acme_{name}:main"}},
            modules={f"acme_{name}": COMMAND},
        )
    text = prime("--help", path=tmp_path).stdout
    assert "say-hello" in text and "What acme-hello is for (acme-hello 1.0)" in text
    assert not list(tmp_path.glob("*.imported"))
    result = prime("say-hello", "a", "--b", path=tmp_path)
    assert (result.returncode, result.stdout) == (7, "hello a --b\n")
    assert [path.stem for path in tmp_path.glob("*.imported")] == ["acme_hello"]


def test_command_of_a_plugin_may_be_a_typer_application(tmp_path):
    source = (
        "import typer\napp = typer.Typer()\n@app.command()\n"
        "def main(times: int = 2):\n    print('x' * times)\n    raise typer.Exit(3)\n"
    )
    entries = {"prime_rl.commands": {"repeat": "acme_typer:app"}}
    write_distribution(tmp_path, "acme-typer", entry_points=entries, modules={"acme_typer": source})
    result = prime("repeat", "--times", "4", path=tmp_path)
    assert (result.returncode, result.stdout) == (3, "xxxx\n")
    assert prime("repeat", "--times", "x", path=tmp_path).returncode == 2
    assert "Usage: prime repeat" in prime("repeat", "--help", path=tmp_path).stdout


@pytest.mark.parametrize("how", BROKEN_COMMANDS)
def test_broken_command_harms_nobody_and_says_why(tmp_path, how):
    source, expected = BROKEN_COMMANDS[how]
    entries = {"prime_rl.commands": {"broken": "acme_broken:main"}}
    write_distribution(
        tmp_path, "acme-broken", entry_points=entries, modules={"acme_broken": source}
    )
    assert prime("--help", path=tmp_path).returncode == 0
    assert prime("plugins", "list", path=tmp_path).returncode == 0
    result = prime("broken", path=tmp_path)
    assert result.returncode == 1
    assert expected in result.stderr and "acme-broken 1.0" in result.stderr
    assert "Traceback" not in result.stderr


def test_unusable_command_is_shown_with_its_reason(tmp_path):
    entries = {"prime_rl.commands": {"tooold": "acme_old:main"}}
    write_distribution(tmp_path, "acme-old", entry_points=entries, requires=["prime-rl>=99"])
    assert "incompatible: needs prime-rl>=99" in prime("--help", path=tmp_path).stdout
    result = prime("tooold", path=tmp_path)
    assert result.returncode == 1 and "needs prime-rl>=99" in result.stderr


def test_command_cannot_take_over_one_of_core(tmp_path):
    entries = {"prime_rl.commands": {"plugins": "acme_thief:main"}}
    write_distribution(
        tmp_path, "acme-thief", entry_points=entries, modules={"acme_thief": COMMAND}
    )
    assert "kind" in prime("plugins", "list", path=tmp_path).stdout
    assert not list(tmp_path.glob("*.imported"))
    assert "acme-thief:plugins" in prime("--help", path=tmp_path).stdout
    assert prime("acme-thief:plugins", path=tmp_path).stdout == "hello\n"


def test_damaged_metadata_of_others_does_not_stop_help_or_list(tmp_path):
    write_distribution(tmp_path, "torn", entry_points_bytes=b"[x]\nno equals sign\n")
    write_distribution(tmp_path, "latin", entry_points_bytes=b"[x]\na = b\xff\n")
    write_loss(tmp_path, "cli_fine")
    result = prime("--help", path=tmp_path)
    assert result.returncode == 0 and "2 installed distribution(s)" in result.stdout
    listing = prime("plugins", "list", path=tmp_path)
    assert listing.returncode == 0
    assert "skipped torn" in listing.stdout and "skipped latin" in listing.stdout
    assert "cli_fine" in listing.stdout


def test_reader_that_goes_away_leaves_no_traceback():
    command = f"{sys.executable} -m prime_rl.cli.main plugins list | head -n 1 > /dev/null"
    result = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert "Traceback" not in result.stderr


def test_list_as_json_has_a_schema_version(tmp_path):
    write_loss(tmp_path, "cli_json")
    report = json.loads(prime("plugins", "list", "--json", "--kind", "loss", path=tmp_path).stdout)
    assert report["schema_version"] == 1
    assert {plugin["kind"] for plugin in report["plugins"]} == {"loss"}
    (mine,) = [plugin for plugin in report["plugins"] if plugin["name"] == "cli_json"]
    assert mine["distribution"] == "acme-cli-json" and mine["state"] == "ok"
