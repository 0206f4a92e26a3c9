"""What a person reads when a configuration is wrong: path, value, expectation, file and line."""

from __future__ import annotations

import subprocess
import sys

import pytest

from prime_rl.configs.toml import parse_toml
from prime_rl.errors import ConfigError


def refusal(load, text, *words) -> str:
    with pytest.raises(ConfigError) as caught:
        load(text, *words)
    return str(caught.value)


def line_of(text: str, needle: str) -> int:
    return next(n for n, line in enumerate(text.splitlines(), 1) if needle in line)


@pytest.mark.parametrize(
    "needle, written, path, hint",
    [
        ("max_steps = 5", "max_stepz = 5", "max_stepz", "Did you mean 'max_steps'?"),
        ("batch_size = 8", "batch_sise = 8", "orchestrator.batch_sise", "'batch_size'"),
        ("group_size = 4", "group_sizes = 4", "orchestrator.train.group_sizes", "'group_size'"),
        ('env = {taskset = {id = "words"}}', 'env.taskset.id = "words"\nnam = "x"',
         "orchestrator.train.source.0.nam", "'name'"),
        ('env = {taskset = {id = "words"}}',
         'env.taskset.id = "words"\nsampling = {temp = 1}\nselect.limits = 3',
         "orchestrator.train.source.0.select.limits", "'limit'"),
        ("[trainer.loss]", "[trainer.loss]\nepz = 1", "trainer.loss.epz", "'eps'"),
        ("[trainer.loss]", "[trainer.loss.inner]\ndept = 1\n[trainer.loss]",
         "trainer.loss.inner.dept", "'depth'"),
        ("[trainer.loss]", "[trainr]\nx = 1\n[trainer.loss]", "trainr", "'trainer'"),
        ("[trainer.loss]", "[[model.moe.layers]]\nlayers = [0]\nbackendd = 1\n[trainer.loss]",
         "model.moe.layers.0.backendd", "'backend'"),
    ],
)  # fmt: skip
def test_unknown_keys_at_every_depth(load, flat, needle, written, path, hint):
    """BL-061: depth 1, 2, 3, in an array of tables, in a plugin's own table."""
    text = flat.replace(needle, written, 1)
    message = refusal(load, text)
    last = path.rpartition(".")[2]
    line = line_of(text, last)
    assert f"recipe.toml:{line}: {path}: unknown key" in message
    assert hint in message


@pytest.mark.parametrize("section, key, right", [
    ("orchestrator", "lr", "trainer.optim.lr"),
    ("trainer", "lr", "trainer.optim.lr"),
    ("inference", "temperature", "orchestrator.train.sampling.temperature"),
    ("model", "max_steps", "max_steps"),
])  # fmt: skip
def test_key_at_the_wrong_level_gets_the_right_place(load, flat, section, key, right):
    """BL-060"""
    message = refusal(load, flat, f"--{section}.{key}", "1")
    assert f"command line: {section}.{key}: unknown key" in message
    assert f"It exists as {right}" in message


def test_top_level_key_of_a_nested_section(load, staged):
    message = refusal(load, f"lr = 1.0\n{staged}")
    assert "recipe.toml:1: lr: unknown key. It exists as trainer.optim.lr" in message


def test_key_that_no_stage_of_the_run_has(load, staged):
    text = staged.replace('type = "rl"', 'type = "sft"\nname = "two"').replace(
        "[stages.orchestrator]\nbatch_size = 4\n", '[stages.data]\nsource = "more.jsonl"\n'
    )
    text = text[: text.index("[[stages.orchestrator")]
    message = refusal(load, text, "--orchestrator.batch-size", "4")
    assert "only rl stages have it" in message


def test_unknown_plugin_lists_the_known_with_their_distributions(load, flat):
    """BL-063"""
    message = refusal(load, flat.replace('type = "probe"', 'type = "prob"', 1))
    assert f"recipe.toml:{line_of(flat, '[trainer.loss]')}: trainer.loss: no loss plugin" in message
    assert "'prob'" in message and "Did you mean 'probe'" in message
    assert "probe (acme-probes 1.0)" in message


def test_broken_plugin_is_told_with_its_wheel(load, flat):
    message = refusal(load, flat, "--trainer.loss.type", "probe_broken")
    assert "probe_broken (acme-probes 1.0) is installed but cannot be used" in message
    assert "Missing" in message


def test_plugin_whose_config_raises_anything(load, flat):
    message = refusal(load, flat, "--trainer.loss.type", "probe_angry", "--trainer.loss.level", "6")
    assert "trainer.loss: the Config of loss probe_angry raised RuntimeError: boom" in message


@pytest.mark.parametrize("path, written, expected", [
    ("seq_len", "true", "found the boolean True, expected an integer >= 2"),
    ("seq_len", '"64"', "found the string '64', expected an integer >= 2"),
    ("seq_len", "64.0", "found the number 64.0, expected an integer >= 2"),
    ("seq_len", "-1", "found the integer -1, expected an integer >= 2"),
    ("seq_len", '"None"', "found null, expected an integer >= 2"),
    ("seq_len", "[64]", "found a list [64], expected an integer >= 2"),
    ("seq_len", f"{2**63}", "fits in 64 bits"),
    ("seed", "1979-05-27", "write it in quotes"),
    ("trainer.optim.lr", "true", "found the boolean True, expected a number > 0"),
    ("trainer.optim.lr", '"1e-3"', "found the string '1e-3', expected a number > 0"),
    ("trainer.optim.lr", "0", "found the integer 0, expected a number > 0"),
    ("trainer.optim.lr", "inf", "found the number inf, expected a finite number"),
    ("trainer.optim.lr", "nan", "found the number nan, expected a finite number"),
    ("trainer.optim.weight_decay", "false", "expected a number or 'auto'"),
    ("trainer.optim.weight_decay", '"atuo"', "expected a number or 'auto'. Did you mean 'auto'?"),
    ("trainer.memory.compile", "1", "found the integer 1, expected true or false"),
    ("trainer.memory.compile", '"yes"', "found the string 'yes', expected true or false"),
    ("trainer.device", '"gpu"', "expected 'auto' or 'cpu' or 'cuda'"),
    ("trainer.optim.type", '"adamm"', "Did you mean 'adamw'?"),
    ("model.name", "3", "found the integer 3, expected a string or None"),
    ("model.fresh", "3", "found the integer 3, expected a table or None"),
    ("ckpt", "true", "found the boolean True, expected a table or None"),
    ("env_vars", "{A = 1}", "found the integer 1, expected a string"),
    ("inference.port", "70000", "expected an integer >= 0 and <= 65535"),
    ("trainer.loss.eps", "true", "found the boolean True, expected a number > 0"),
    ("trainer.loss.eps", "nan", "expected a finite number"),
    ("trainer.loss.eps", '"0.1"', "found the string '0.1', expected a number > 0"),
    ("trainer.loss.count", "true", "found the boolean True, expected an integer"),
    ("trainer.loss.names", '["a", 1]', "expected a string"),
    ("trainer.loss.pair", "[1, true]", "item 1: found the boolean True, expected an integer"),
    ("trainer.loss.table", "{a = {b = inf}}", "expected a finite number"),
    ("trainer.loss.inner.depth", "0", "found the integer 0, expected an integer >= 1"),
    ("trainer.loss.mode", '"sfot"', "Did you mean 'soft'?"),
])  # fmt: skip
def test_wrong_values_in_a_file(load, flat, path, written, expected, tmp_path):
    (tmp_path / "over.toml").write_text(f"# first line\n{path} = {written}\n")
    message = refusal(load, flat, "@", str(tmp_path / "over.toml"))
    shown = path.removesuffix(".type")
    assert f"over.toml:2: {shown}" in message
    assert expected in message


@pytest.mark.parametrize("words, expected", [
    (["--seq-len", "abc"], "--seq-len: found 'abc', expected an integer >= 2"),
    (["--seq-len", "1.5"], "expected an integer >= 2"),
    (["--seq-len", "1"], "seq_len: found the integer 1, expected an integer >= 2"),
    (["--seq-len"], "--seq-len: needs a value: an integer >= 2"),
    (["--trainer.optim.lr", "nan"], "trainer.optim.lr: found the number nan"),
    (["--trainer.optim.lr", "-inf"], "expected a finite number"),
    (["--trainer.memory.compile=1"], "expected true or false"),
    (["--trainer.optim", "{}"], "this is a section"),
    (["--trainer.loss", '{"eps": 1}'], "JSON fits plain tables only"),
    (["--orchestrator.train.source", "[]"], "a list of sections"),
    (["--orchestrator.train.source.7.name", "x"], "index 7 is past the end of a list of 1"),
    (["--orchestrator.train.source.99999999999999.name", "x"], "no sensible list index"),
    (["--orchestrator.train.source.0.select.exclude", "[1"], "expected a JSON list"),
    (["--env-vars", "[1]"], "expected a JSON object"),
    (["--stages.3.seed", "1"], "there is no stage 3"),
    (["--stages.seed", "1"], "write --stages.N.section.key value"),
    (["--rl", "x"], "names a stage"),
    (["--nothing.at.all", "1"], "command line: nothing: unknown key"),
    (["--seed..x", "1"], "a part of the path is empty"),
    (["-x"], "no such option"),
    (["@file.toml"], "write a space after the @"),
    (["--trainer.optim", "@"], "needs a file"),
    (["--seed", "@", "nowhere.toml"], "fits a section"),
    (["--trainer.optim", "@", "nowhere.toml"], "nowhere.toml: cannot be read"),
    (["--plugin"], "--plugin needs a plugin's name"),
    (["--clean=yes"], "takes no value"),
    (["--resume", "x"], "found two recipes"),
    (["--resume=x"], "--resume.step: found 'x', expected an integer >= 1"),
    (["--resume.stepp", "3"], "--resume.stepp: unknown; known: step"),
    (["--resume.step", "0"], "--resume: step"),
    (["--plugin-versions", "[]"], "unknown key"),
])  # fmt: skip
def test_wrong_words(load, flat, words, expected):
    assert expected in refusal(load, flat, *words)


def test_every_problem_is_listed_at_once(load, flat):
    text = flat.replace("max_steps = 5", "max_steps = 0\nseqlen = 4").replace(
        "batch_size = 8", "batch_size = true"
    )
    message = refusal(load, text, "--trainer.optim.lr", "x", "--trainer.loss.eps", "-1")
    assert message.startswith("5 problems in the configuration:")
    for part in ("max_steps: found", "seqlen: unknown", "batch_size: found", "lr: found 'x'"):
        assert part in message


def test_missing_keys(load):
    message = refusal(load, "[model.fresh.architecture]\nmodel_type = 'probe_model'\n")
    assert "max_steps: missing, expected an integer >= 1" in message
    assert "orchestrator: missing, expected a table" in message


def test_shared_key_is_reported_once_where_it_was_written(load, staged):
    message = refusal(load, staged.replace("lr = 0.5", "lrr = 0.5"))
    assert message.count("unknown key") == 1
    assert f"recipe.toml:{line_of(staged, 'lr = 0.5')}: trainer.optim.lrr" in message


def test_inherited_key_is_reported_where_it_was_written(load, flat):
    text = flat.replace("group_size = 4", "group_size = 4\nsampling = {temperature = 3}")
    message = refusal(load, text)
    assert message.count("temperature") == 1
    assert "orchestrator.train.sampling.temperature: found the integer 3" in message


@pytest.mark.parametrize("algo, expected", [
    ('"opd"', "recipe.toml:10: orchestrator.train.algo.teacher: missing, expected a table"),
    ('{type = "rae", decay = 2}', "orchestrator.train.algo.decay: found the integer 2, expected"),
    ('{type = "rae", dekay = 0}', "orchestrator.train.algo.dekay: unknown key. Did you mean 'decay'"),
    ('{type = "echo", alpha = {Tool = 1}}', "orchestrator.train.algo.alpha: found the role 'Tool'"),
    ("3", "orchestrator.train.algo: expected a table with a `type`, found int"),
])  # fmt: skip
def test_a_mistake_in_the_group_s_algorithm_is_said_once_in_its_place(load, flat, algo, expected):
    start, rest = flat.split("group_size = 4\n")
    line = len(start.splitlines()) + 2
    message = refusal(load, f"{start}group_size = 4\nalgo = {algo}\n{rest}")
    assert len(message.splitlines()) == 1, message
    assert expected.replace("toml:10", f"toml:{line}") in message


def test_a_source_s_own_mistake_is_said_beside_that_of_its_group(load, flat):
    text = flat.replace("group_size = 4", 'group_size = 4\nalgo = {type = "rae", decay = 2}')
    text = text.replace('"words"}}', '"words"}}\nalgo = {decay = 3}')
    message = refusal(load, text)
    assert "orchestrator.train.algo.decay: found the integer 2" in message
    assert "orchestrator.train.source.0.algo.decay: found the integer 3" in message
    assert message.startswith("2 problems")


@pytest.mark.parametrize("change, expected", [
    (("group_size = 4", "group_size = 3"), "batch_size 8 is not a multiple of group_size 3"),
    (('id = "words"', 'id = "all"'), "'all' is reserved"),
    (('{id = "words"}', "{}"), "expected `taskset = {id = ...}`"),
    (('"words"}}', '"words"}}\n[[orchestrator.train.source]]\nenv.taskset.id = "words"'), "twice"),
    (('"words"}}', '"words"}}\nname = "../x"'), "'../x'"),
    (("[model.fresh.architecture]\nmodel_type = \"probe_model\"", ""), "first stage needs"),
    (("max_steps = 5", 'max_steps = 5\nmodel.name = "x"'), "exclude each other"),
    (('"probe_model"', '"probe_modell"'), "Did you mean 'probe_model'"),
    (("max_steps = 5", 'max_steps = 5\nmodel.options.rope = 1'), "model.options.rope: unknown key"),
    (("max_steps = 5", 'max_steps = 5\nmodel.options.rope_base = -1'), "expected a number > 0"),
    (("max_steps = 5", 'max_steps = 5\nname = "configs"'), "name: found 'configs'"),
    (("max_steps = 5", 'max_steps = 5\nrun.name = "../x"'), "run.name: found '../x'"),
    (("max_steps = 5", 'max_steps = 5\nrun.dir = "/x"'), "run.dir: found '/x'"),
    (("max_steps = 5", 'max_steps = 5\nstages = 3'), "stages: found the integer 3"),
    (("max_steps = 5", 'max_steps = 5\nstages = []'), "stages"),
    (("max_steps = 5", 'max_steps = 5\nstages = [1, {type = "rll"}]'), "Did you mean 'rl'"),
])  # fmt: skip
def test_checks_across_sections(load, flat, change, expected):
    text = flat.replace(*change, 1)
    assert text != flat
    assert expected in refusal(load, text)


def test_stage_names(load, staged):
    twice = staged.replace('type = "sft"', 'type = "sft"\nname = "x"').replace(
        'type = "rl"', 'type = "rl"\nname = "x"'
    )
    assert "two stages are called 'x'" in refusal(load, twice)
    assert "belongs to one stage" in refusal(load, f'name = "x"\n{staged}')
    assert "write --stages.0.name" in refusal(load, staged, "--name", "x")
    assert "say which one" in refusal(load, staged, "--resume", "3")


@pytest.mark.parametrize("content, expected", [
    (b"max_steps = ", "not valid TOML"),
    (b"\xff\xfe", "cannot be read"),
    (b"a = " + b"[" * 5000, "nested too deeply"),
    (b"a = 1\na = 2", "not valid TOML"),
    (b"a = 1" + b"0" * 5000, "not valid TOML"),
])  # fmt: skip
def test_unreadable_files(load, flat, tmp_path, content, expected):
    (tmp_path / "bad.toml").write_bytes(content)
    message = refusal(load, flat, "@", str(tmp_path / "bad.toml"))
    assert "bad.toml" in message and expected in message


def test_folder_and_missing_file(load, flat, tmp_path):
    assert "found a folder" in refusal(load, flat, "@", str(tmp_path))
    message = refusal(load, None, str(tmp_path / "recipe.tom.toml"))
    assert "no such recipe file" in message


LINES = '''\
# comment = 1
top = 1

[table."quoted.key"]
a.b = [1, # note = 2
  {x = 1, "y z" = """multi
line"""}, ]
text = \'\'\'
[not.a.table]
key = 1
\'\'\'
after = "with \\" = quote"

[[items]]
n = 1
[items.inner]
deep = true
[[items]]
n = 2
[[items.inner.list]]
k = 3
[[items.inner.list]]
k = {
}
'''


def test_lines_of_a_document_worked_out_by_hand():
    document = parse_toml(LINES.replace("{\n}", "{}"), "x.toml")
    expected = {
        ("top",): 2,
        ("table",): 4,
        ("table", "quoted.key"): 4,
        ("table", "quoted.key", "a", "b"): 5,
        ("table", "quoted.key", "a", "b", 1, "x"): 6,
        ("table", "quoted.key", "a", "b", 1, "y z"): 6,
        ("table", "quoted.key", "text"): 8,
        ("table", "quoted.key", "after"): 12,
        ("items", 0): 14,
        ("items", 0, "n"): 15,
        ("items", 0, "inner"): 16,
        ("items", 0, "inner", "deep"): 17,
        ("items", 1): 18,
        ("items", 1, "n"): 19,
        ("items", 1, "inner", "list", 0, "k"): 21,
        ("items", 1, "inner", "list", 1): 22,
        ("items", 1, "inner", "list", 1, "k"): 23,
    }
    assert {path: document.get(*path).origin.line for path in expected} == expected


def test_command_line_prints_no_traceback(tmp_path):
    recipe = tmp_path / "bad.toml"
    recipe.write_text("max_steps = true\n")
    done = subprocess.run(
        [sys.executable, "-m", "prime_rl.cli.main", "config", "validate", str(recipe)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "bad.toml:1: max_steps: found the boolean True" in done.stderr
    assert "Traceback" not in done.stderr and done.stdout == ""
