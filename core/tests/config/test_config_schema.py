"""JSON schema, help text and the commands of `prime config`."""

from __future__ import annotations

import json
import tomllib

import pytest

from prime_rl.cli.config import command
from prime_rl.configs.help import field_help
from prime_rl.configs.schema import run_schema


def references(node):
    """Every $ref below a node."""
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref":
                yield value
            else:
                yield from references(value)
    elif isinstance(node, list):
        for value in node:
            yield from references(value)


def test_schema_holds_every_usable_plugin(registry):
    schema = run_schema(registry)
    definitions = schema["$defs"]
    loss = definitions["TrainerConfig"]["properties"]["loss"]
    listed = [entry.get("$ref") for entry in loss["anyOf"]]
    assert "#/$defs/loss.probe" in listed and "#/$defs/loss.probe_other" in listed
    assert loss["description"] == "The rl component of the loss."
    probe = definitions["loss.probe"]
    assert probe["properties"]["eps"]["exclusiveMinimum"] == 0
    assert probe["properties"]["eps"]["description"] == "Half width of the probe, in nats."
    assert probe["additionalProperties"] is False
    assert definitions["loss.probe.Inner"]["properties"]["depth"]["minimum"] == 1
    options = definitions["ModelConfig"]["properties"]["options"]["anyOf"]
    assert any("rope_base" in entry.get("properties", {}) for entry in options)
    assert "x-plugin-kind" not in json.dumps(schema)
    for reference in references(schema):
        assert reference.removeprefix("#/$defs/") in definitions, reference


def test_schema_names_the_plugins_it_had_to_leave_out(registry):
    assert any("probe_broken" in problem for problem in run_schema(registry)["x-problems"])


def test_help_shows_every_field_with_default_and_plugins(load, flat, registry):
    text = field_help(load(flat).run, registry)
    assert "--trainer.loss.eps  (a number > 0; default 0.1)" in text
    assert "Half width of the probe, in nats." in text
    assert "--model.options.rope-base  (a number > 0; default 10000.0)" in text
    assert "--trainer.loss.inner.depth  (an integer >= 1; default 1)" in text
    assert "--max-steps  (an integer >= 1; required)" in text
    assert (
        "--orchestrator.train.source.N.select.limit  (an integer >= 1 or None; default None)"
        in text
    )
    assert "--data.source  (a string; required)" in text
    assert "type: adamw | sign_sgd; keys of 'adamw'" in text
    for name in ("--seq-len", "--output-dir", "--ckpt.interval", "--router", "--eval-before"):
        assert name.removeprefix("--router") in text


def test_help_without_a_run_shows_default_plugins(registry):
    text = field_help(None, registry)
    assert "[trainer.loss]" in text and "--model.fresh.seed" in text


@pytest.fixture
def recipe(tmp_path, flat, probe_wheel):
    path = tmp_path / "recipe.toml"
    path.write_text(flat)
    return str(path)


def test_validate(recipe, capsys):
    assert command(["validate", recipe]) == 0
    assert capsys.readouterr().out.startswith("OK: words--probe_model--")
    assert command(["validate", recipe, "--trainer.lr", "1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "trainer.lr: unknown key" in captured.err


def test_validate_refuses_choices_that_do_not_fit(recipe, capsys):
    assert command(["validate", recipe, "--orchestrator.train.sampling.top-k", "513"]) == 2
    assert "at most 512 kept tokens" in capsys.readouterr().err


def test_show_is_a_recipe_of_itself(recipe, capsys, tmp_path):
    assert command(["show", recipe, "--run.name", "x", "--seed", "5"]) == 0
    shown = capsys.readouterr().out
    assert tomllib.loads(shown)["stages"][0]["seed"] == 5
    (tmp_path / "again.toml").write_text(shown)
    assert command(["show", str(tmp_path / "again.toml")]) == 0
    assert capsys.readouterr().out == shown
    assert command(["show", "--json", recipe]) == 0
    assert json.loads(capsys.readouterr().out)["stages"][0]["trainer"]["loss"]["pair"] == [1, 2]


def test_schema_command_and_usage(probe_wheel, capsys):
    assert command(["schema", "--json"]) == 0
    assert "loss.probe" in json.loads(capsys.readouterr().out)["$defs"]
    assert command([]) == 0
    assert "validate" in capsys.readouterr().out
    assert command(["shw"]) == 2
    assert command(["schema", "x"]) == 2
