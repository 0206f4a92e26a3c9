"""Which recipe a word means, and choosing or switching off plugins."""

from __future__ import annotations

import pytest

from prime_rl.configs.load import load_run
from prime_rl.configs.recipes import find_recipe
from prime_rl.errors import ConfigError, PluginError
from prime_rl.plugins import scan


def test_names_of_installed_recipes(registry, probe_wheel, tmp_path, monkeypatch):
    recipes = probe_wheel / "probe_wheel" / "recipes"
    assert find_recipe("probe_start", registry) == recipes / "probe_start.toml"
    assert find_recipe("probe_model:debug", registry) == recipes / "debug.toml"
    assert find_recipe("probe-model:debug", registry) == recipes / "debug.toml"
    assert find_recipe("acme-probes:debug", registry) == recipes / "debug.toml"
    assert find_recipe("acme-probes:probe_model:debug", registry) == recipes / "debug.toml"
    assert find_recipe(str(recipes / "debug.toml"), registry) == recipes / "debug.toml"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain").write_text("")
    assert str(find_recipe("plain", registry)) == "plain"


@pytest.mark.parametrize("text, expected", [
    ("probe_starr", "Did you mean .*probe_start"),
    ("probe_model:debugg", "Did you mean .*probe_model:debug"),
    ("nowhere:debug", "no recipe is called 'nowhere:debug'"),
    ("missing.toml", "no such recipe file: missing.toml"),
    ("a\0b", "no recipe is called"),
    ("x" * 5000, "no recipe is called"),
    ("", "no recipe is called ''"),
])  # fmt: skip
def test_unknown_recipes(registry, text, expected):
    with pytest.raises(ConfigError, match=expected):
        find_recipe(text, registry)


def test_near_file_names(registry, tmp_path):
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(ConfigError, match="Did you mean 'recipe.toml'"):
        find_recipe(str(tmp_path / "recipes.toml"), registry)


def test_without_a_recipe_the_default_runs(registry):
    loaded = load_run([], registry, default_recipe="probe_start")
    assert loaded.run.stages[0].max_steps == 6
    assert [path.name for path in loaded.inputs] == ["probe_start.toml"]
    with pytest.raises(ConfigError, match="no recipe: give a TOML file"):
        load_run([], registry, default_recipe=None)


def test_a_model_alone_runs_its_debug_recipe(registry):
    loaded = load_run(["--plugin", "probe-model"], registry, default_recipe=None)
    assert [path.name for path in loaded.inputs] == ["debug.toml"]
    assert loaded.run.stages[0].model.plugin == "probe_model"
    qualified = load_run(["--plugin=acme-probes:probe_model"], registry, default_recipe=None)
    assert qualified.run.stages[0].model.plugin == "probe_model"


@pytest.mark.parametrize("written, settled", [
    ("probe-model", "probe_model"),
    ("Probe_Model", "probe_model"),
    ("acme-probes:probe-model", "acme-probes:probe_model"),
])  # fmt: skip
def test_model_plugin_is_settled_by_one_spelling(load, flat, written, settled):
    run = load(flat, "--model.plugin", written).run
    assert run.stages[0].model.plugin == settled
    assert ("model", "probe_model") in {(row["kind"], row["name"]) for row in run.plugin_versions}


def test_plugin_is_chosen_for_its_kind_in_every_stage(load, staged):
    words = ["--plugin", "probe_other", "--trainer.loss.power", "3"]
    with pytest.raises(PluginError, match="trainer.loss.*weight_broadcast.*instead of --plugin"):
        load(staged, *words)
    sft, rl = load(staged, "--plugin", "probe_deaf", "--plugin", "probe_prompt").run.stages
    assert (sft.router.type, rl.router.type) == ("probe_deaf", "probe_deaf")
    assert rl.orchestrator.train.source[0].algo.type == "probe_prompt"


def test_unknown_plugin(load, flat):
    with pytest.raises(PluginError, match="no installed plugin is called 'probe_dead'.*probe_deaf"):
        load(flat, "--plugin", "probe_dead")


def test_no_plugin(load, flat):
    with pytest.raises(ConfigError, match="switched off by --no-plugin"):
        load(flat, "--trainer.loss", "probe_angry", "--no-plugin", "probe_angry")
    loaded = load(flat, "--no-plugin", "probe_angry")
    assert loaded.run.stages[0].plugins.deny == ["probe_angry"]
    assert load(flat, "--no-plugin", "probe_angrry").warnings[0].count("probe_angry") == 1


def test_switches_of_the_file(load, flat):
    with pytest.raises(ConfigError, match=r"switched off by \[plugins\] deny"):
        load(flat + '[plugins]\ndeny = ["acme-probes"]\n')
    with pytest.raises(ConfigError, match=r"not named in \[plugins\] allow"):
        load(flat, "--plugins.allow", '["probe_model"]')
    assert load(flat, "--plugins.allow", '["acme-probes"]').run.stages[0].plugins.allow
    with pytest.raises(PluginError, match=r"\[plugins\] required: 'nonesuch' is not installed"):
        load(flat + '[plugins]\nrequired = ["nonesuch"]\n')


def test_environment_switch(flat, probe_wheel, tmp_path, monkeypatch):
    monkeypatch.setenv("PRIME_PLUGINS", "none")
    (tmp_path / "recipe.toml").write_text(flat)
    with pytest.raises(ConfigError, match="PRIME_PLUGINS=none"):
        load_run([str(tmp_path / "recipe.toml")], scan())


def test_help_never_fails(registry):
    loaded = load_run(["--help", "nowhere", "--x", "1"], registry)
    assert loaded.arguments.help and loaded.run is None
