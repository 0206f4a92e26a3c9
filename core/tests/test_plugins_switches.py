"""PRIME_PLUGINS, allow, deny, required and --no-plugin: read before any import."""

import os
import subprocess
import sys

import pytest

from prime_rl.errors import PluginError
from prime_rl.plugins import Registry, Switches, scan
from prime_rl.plugins.switches import parse_environment
from prime_rl.testing.distributions import write_distribution, write_loss


@pytest.fixture
def look(tmp_path, monkeypatch):
    """Registry with two third-party losses, under the given switches."""
    write_loss(tmp_path, "switch_one", distribution="wheel-one")
    write_loss(tmp_path, "switch_two", distribution="wheel-two")
    monkeypatch.syspath_prepend(str(tmp_path))

    def looked(**switches) -> Registry:
        return scan(Switches(**switches))

    return looked


def usable(registry: Registry) -> list[str]:
    return [n for n in registry.names("loss") if n.startswith("switch_")]


@pytest.mark.parametrize(
    ("value", "parsed"),
    [
        (None, None),
        ("", None),
        ("  ", None),
        ("all", None),
        ("ALL", None),
        ("none", ()),
        ("a", ("a",)),
        ("a, b-c ,,wheel:d", ("a", "b-c", "wheel:d")),
    ],
)
def test_environment_is_none_all_or_a_list(value, parsed):
    assert parse_environment(value) == parsed


@pytest.mark.parametrize(
    ("switches", "expected"),
    [
        ({}, ["switch_one", "switch_two"]),
        ({"environment": ()}, []),
        ({"environment": ("switch_one",)}, ["switch_one"]),
        ({"environment": ("wheel-two",)}, ["switch_two"]),
        ({"environment": ("Wheel_Two:switch-two",)}, ["switch_two"]),
        ({"environment": ("wheel-one:switch_two",)}, []),
        ({"allow": ("switch-one",)}, ["switch_one"]),
        ({"allow": ()}, []),
        ({"allow": ("switch_one",), "deny": ("switch_one",)}, []),
        ({"deny": ("wheel-one",)}, ["switch_two"]),
        ({"no_plugin": ("switch_two",)}, ["switch_one"]),
        ({"environment": ("switch_one",), "allow": ("switch_two",)}, []),
    ],
)
def test_what_each_switch_leaves(look, switches, expected):
    registry = look(**switches)
    assert usable(registry) == expected
    for record in registry.of_kind("loss"):
        if record.name.startswith("switch_") and record.name not in expected:
            assert record.state == "disabled" and record.reason


def test_core_survives_none_and_allow_but_not_deny(look):
    assert "grpo" in look(environment=()).names("algorithm")
    assert "grpo" in look(allow=("switch_one",)).names("algorithm")
    assert "grpo" not in look(deny=("grpo",)).names("algorithm")


def test_disabled_plugin_that_is_asked_for_says_by_which_switch(look):
    with pytest.raises(PluginError, match=r"disabled: switched off by \[plugins\] deny"):
        look(deny=("switch_one",)).load("loss", "switch_one")
    with pytest.raises(PluginError, match="PRIME_PLUGINS=none"):
        look(environment=()).load("loss", "switch_one")


@pytest.mark.parametrize(
    ("switches", "reason"),
    [
        ({"environment": ()}, "PRIME_PLUGINS=none does not name it"),
        ({"environment": ("grpo",)}, "PRIME_PLUGINS=grpo does not name it"),
        ({"allow": ()}, r"not named in \[plugins\] allow"),
    ],
)
def test_advice_fits_switches_that_list_what_may_be_used(look, switches, reason):
    with pytest.raises(PluginError, match=f"{reason}. Change that switch"):
        look(**switches).load("loss", "switch_one")


@pytest.mark.parametrize("switches", [{"deny": ("switched_model",)}, {"environment": ()}])
def test_model_type_of_a_plugin_that_is_switched_off_says_so(look, tmp_path, switches):
    """Of the plugin's own name, and of one that a plugin of another name may serve."""
    entries = {"prime_rl.models": {"switched_model": "no_module:Model"}}
    write_distribution(tmp_path, "wheel-model", entry_points=entries)
    registry = look(**switches)
    with pytest.raises(PluginError, match="switched_model .* is disabled: switched off") as caught:
        registry.model_for("switched_model")
    assert "pip install" not in str(caught.value)
    with pytest.raises(PluginError, match="switched_model was not asked: switched off"):
        registry.model_for("another_type")


def test_unknown_names_are_warned_about_with_near_matches(look):
    """BL-116"""
    registry = look(
        environment=("switch_on",), deny=("wheel-twoo",), no_plugin=("zzz",), allow=("grpo",)
    )
    warnings = registry.check_switches()
    assert len(warnings) == 3
    assert "PRIME_PLUGINS names 'switch_on'" in warnings[0] and "'switch_one'" in warnings[0]
    assert "[plugins] deny names 'wheel-twoo'" in warnings[1] and "'wheel-two'" in warnings[1]
    assert warnings[2] == "--no-plugin names 'zzz', which is not installed."


def test_required_and_missing_is_an_error(look):
    assert look(required=("switch_one", "wheel-two", "grpo")).check_switches() == []
    with pytest.raises(PluginError, match="'switch_won' is not installed. Did you mean"):
        look(required=("switch_won",)).check_switches()
    with pytest.raises(PluginError, match="'switch_one' cannot be used: .* is disabled"):
        look(required=("switch_one",), deny=("switch_one",)).check_switches()


def test_environment_is_read_from_the_process(look, monkeypatch):
    monkeypatch.setenv("PRIME_PLUGINS", "switch_two")
    assert usable(scan()) == ["switch_two"]
    assert usable(scan(Switches.read(deny=["switch_two"]))) == []


TELL_TALE = "import pathlib\npathlib.Path(__file__).with_suffix('.imported').touch()\n"


@pytest.mark.parametrize("group", ["prime_rl.losses", "prime_rl.hooks", "prime_rl.commands"])
def test_disabled_plugin_is_never_imported(tmp_path, group):
    """BL-113: a switch that acts after the import acts too late."""
    modules = {"telltale": TELL_TALE + "def Plugin(arguments): ...\n"}
    entries = {group: {"telltale": "telltale:Plugin"}}
    write_distribution(tmp_path, "telltale-wheel", entry_points=entries, modules=modules)
    code = (
        "from prime_rl.plugins import scan\n"
        "from prime_rl.plugins.hooks import load_hooks\n"
        "registry = scan(); load_hooks(registry)\n"
        "try: registry.load('loss', 'telltale')\n"
        "except Exception as error: pass\n"
        "from prime_rl.cli.main import main\n"
        "main(['--help']); main(['plugins', 'list']); main(['telltale'])\n"
    )
    marker = tmp_path / "telltale.imported"
    for value, imported in (("none", False), ("all", True)):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PRIME_PLUGINS": value}
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
        assert marker.exists() is imported, value
