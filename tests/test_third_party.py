"""A third party's wheels, made by `prime plugins new`, work beside ours without a line in core."""

import importlib.util
import json
import tomllib
from pathlib import Path

import pytest

from prime_rl import __version__
from prime_rl.plugins.kinds import KINDS
from prime_rl.testing.scaffold import scaffolded_kinds, write_plugin
from prime_rl.testing.third_party import ThirdParty, install_third_party

PRIME = ("-m", "prime_rl.cli.main")


@pytest.fixture(scope="module")
def loss(tmp_path_factory: pytest.TempPathFactory) -> ThirdParty:
    return install_third_party(tmp_path_factory.mktemp("loss"), {"loss": ["clip3"]})


def test_new_loss_is_listed_with_its_wheel(loss):
    report = json.loads(loss.run(*PRIME, "plugins", "list", "--json", "--kind", "loss").stdout)
    (clip3,) = [plugin for plugin in report["plugins"] if plugin["name"] == "clip3"]
    assert clip3["distribution"] == "prime-rl-loss-clip3"
    assert clip3["version"] == "0.1.0"
    assert clip3["state"] == "ok"
    assert clip3["location"] == str(loss.site)
    major, minor, _ = __version__.split(".")
    assert clip3["requires_core"] in (
        f">={major}.{minor},<{int(major) + 1}",
        f"<{int(major) + 1},>={major}.{minor}",
    )


def test_new_loss_has_fewer_than_40_lines(loss):
    (path,) = loss.repositories[0].glob("src/*/loss.py")
    assert len(path.read_text().splitlines()) < 40


SECTION = """
from prime_rl.configs.base import BaseConfig, ValidationContext, defaults, plugin_section
from prime_rl.plugins import scan
import sys, tomllib

class Trainer(BaseConfig):
    loss: plugin_section("loss", default="clip3") = defaults()

registry = scan()
context = ValidationContext(config_class=registry.config_class)
trainer = Trainer.model_validate(tomllib.loads(sys.argv[1]), context=context)
assert Trainer.model_validate(trainer.model_dump(), context=context) == trainer
print(trainer.model_dump_json())
print([row["version"] for row in registry.table() if row["name"] == "clip3"])
assert "torch" not in sys.modules
"""


def test_new_loss_is_configured_validated_and_in_the_table(loss):
    done = loss.run("-c", SECTION, '[loss]\ntype = "clip3"\nmax_log_ratio = 0.5')
    assert done.stdout.splitlines() == [
        '{"loss":{"type":"clip3","max_log_ratio":0.5}}',
        "['0.1.0']",
    ], done.stderr
    wrong = loss.run("-c", SECTION, '[loss]\ntype = "clip3"\nmax_log_ratio = -1')
    assert "loss.max_log_ratio" in wrong.stderr
    unknown = loss.run("-c", SECTION, '[loss]\ntype = "clip3"\nmax_ratio = 1')
    assert "loss.max_ratio" in unknown.stderr


def test_show_tells_what_the_new_loss_can_be_told(loss):
    text = loss.run(*PRIME, "plugins", "show", "clip3").stdout
    assert "max_log_ratio" in text and "are left out (nats)" in text
    assert "prime-rl-loss-clip3 0.1.0" in text


TRAINING_STEP = """
import sys
from pathlib import Path
from test_trainer_stage import OPTIM, rl_rows
from trainer_world import ScriptedOrchestrator, make_run, metrics_of
from prime_rl.configs.load import save_resolved
from prime_rl.trainer.main import run_trainer

loss = {"type": "clip3", "max_log_ratio": 0.5}
run = make_run(Path(sys.argv[1]), "rl", max_steps=2, trainer={**OPTIM, "loss": loss})
save_resolved(run, Path(sys.argv[1]) / "run.json")
orchestrator = ScriptedOrchestrator(run, rl_rows(2))
try:
    run_trainer(run, 0)
finally:
    orchestrator.close()
print(sorted(metrics_of(run)[-1]))
"""


def test_new_loss_trains_real_steps_and_is_in_the_saved_run(loss, tmp_path):
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n{TRAINING_STEP}"
    done = loss.run("-c", script, str(tmp_path))
    assert done.returncode == 0, done.stderr
    for metric in ("loss/mean", "optim/grad_norm", "mismatch_kl/all"):
        assert metric in done.stdout
    saved = json.loads((tmp_path / "run.json").read_text())["stages"][0]["trainer"]["loss"]
    assert saved == {"type": "clip3", "max_log_ratio": 0.5}


@pytest.mark.slow
def test_new_plugins_of_every_kind_pass_their_own_tests_and_doctor(tmp_path):
    """All in one environment: what `prime plugins new` writes conforms as written."""
    plugins = {kind: [f"fresh_{kind}"] for kind in scaffolded_kinds()}
    made = install_third_party(tmp_path, plugins)
    tests = [str(path / "tests") for path in made.repositories]
    options = (
        "-q",
        "-p",
        "no:cacheprovider",
        "--import-mode=importlib",
        "--rootdir",
        str(tmp_path),
    )
    done = made.run("-m", "pytest", *options, *tests)
    assert done.returncode == 0, done.stdout + done.stderr
    findings = json.loads(made.run(*PRIME, "plugins", "doctor", "--json").stdout)["findings"]
    ours = [finding for finding in findings if "fresh_" in finding["subject"]]
    assert len(ours) == len(plugins)
    assert {finding["level"] for finding in ours} == {"ok"}, ours


def test_every_kind_with_a_kit_has_a_template_and_the_other_way_round():
    kits = {kind for kind in KINDS if importlib.util.find_spec(f"prime_rl.testing.{kind}")}
    assert kits == set(scaffolded_kinds())


def test_written_repository_is_complete(tmp_path):
    folder = write_plugin("loss", "Two-Words", tmp_path)
    assert folder == tmp_path / "prime-rl-loss-two-words"
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    target = {"two_words": "prime_rl_loss_two_words:TwoWords"}
    assert project["entry-points"] == {"prime_rl.losses": target}
    assert (folder / "README.md").exists()
    assert (folder / "tests" / "test_conformance.py").exists()


@pytest.mark.parametrize(
    ("kind", "name", "expected"),
    [
        ("looss", "x", "'looss' is no plugin kind; choose one of: "),
        ("launcher", "x", "'launcher' has no template"),
        ("loss", "3x", "'3x' is no plugin name"),
        ("loss", "a b", "is no plugin name"),
        ("loss", "../up", "is no plugin name"),
        ("loss", "", "is no plugin name"),
        ("loss", "taken", "exists already"),
    ],
)
def test_what_cannot_be_written(tmp_path, kind, name, expected):
    (tmp_path / "prime-rl-loss-taken").mkdir()
    (tmp_path / "prime-rl-loss-taken" / "precious.txt").touch()
    with pytest.raises(Exception, match=expected):
        write_plugin(kind, name, tmp_path)
    assert [path.name for path in tmp_path.rglob("*.txt")] == ["precious.txt"]
    assert not list(tmp_path.rglob("*.py"))
