"""Forms of the command line, precedence, and how keys reach stages and sources."""

from __future__ import annotations

import pytest

from prime_rl.errors import ConfigError

PLAIN = """
max_steps = 5
[model.fresh.architecture]
model_type = "probe_model"
[[orchestrator.train.source]]
env.taskset.id = "words"
[trainer.loss]
type = "probe"
[weight_broadcast]
type = "probe"
[router]
type = "probe"
[inference.engine]
type = "probe"
"""


def stage(loaded):
    return loaded.run.stages[0]


def test_flat_recipe_becomes_one_rl_stage(load):
    run = load(PLAIN).run
    assert [one.type for one in run.stages] == ["rl"]
    assert run.stages[0].max_steps == 5
    assert run.stages[0].trainer.loss.eps == 0.1
    assert run.stages[0].orchestrator.train.source[0].label == "words"


@pytest.mark.parametrize(
    "words, path, expected",
    [
        (["--max-steps", "9"], "max_steps", 9),
        (["--max_steps", "9"], "max_steps", 9),
        (["--max-steps=9"], "max_steps", 9),
        (["--trainer.optim.weight-decay", "0.5"], "trainer.optim.weight_decay", 0.5),
        (["--trainer.optim.weight_decay=3"], "trainer.optim.weight_decay", 3.0),
        (["--trainer.optim.max-norm", "None"], "trainer.optim.max_norm", None),
        (["--trainer.optim.lr", "1e-3"], "trainer.optim.lr", 1e-3),
        (["--trainer.optim.type", "sign_sgd"], "trainer.optim.type", "sign_sgd"),
        (["--trainer.memory.compile"], "trainer.memory.compile", True),
        (["--trainer.memory.compile", "true"], "trainer.memory.compile", True),
        (["--trainer.memory.compile=false"], "trainer.memory.compile", False),
        (["--no-trainer.memory.compile"], "trainer.memory.compile", False),
        (["--trainer.memory.no-compile"], "trainer.memory.compile", False),
        (["--model.moe.freeze-router", "auto"], "model.moe.freeze_router", True),
        (["--no-model.moe.freeze-router"], "model.moe.freeze_router", False),
        (["--ckpt"], "ckpt.interval", None),
        (["--ckpt.interval", "4"], "ckpt.interval", 4),
        (["--orchestrator.train.source.0.name", "x"], "orchestrator.train.source.0.name", "x"),
        (["--orchestrator.train.source.0.select.limit", "7"],
         "orchestrator.train.source.0.select.limit", 7),
        (["--orchestrator.train.source.0.select.exclude", "[1, 2]"],
         "orchestrator.train.source.0.select.exclude", [1, 2]),
        (["--orchestrator.train.source.0.env.taskset.num-words", "12"],
         "orchestrator.train.source.0.env", {"taskset": {"id": "words", "num_words": 12}}),
        (["--env-vars", '{"A": "b"}'], "env_vars", {"A": "b"}),
        (["--env-vars.SOME-NAME", "3"], "env_vars", {"SOME-NAME": "3"}),
        (["--trainer.loss.no-flag"], "trainer.loss.flag", False),
        (["--trainer.loss.names", '["a"]'], "trainer.loss.names", ["a"]),
        (["--trainer.loss.table", '{"k": [1, null]}'], "trainer.loss.table", {"k": [1, None]}),
        (["--trainer.loss.table.k", "1.5"], "trainer.loss.table", {"k": 1.5}),
        (["--trainer.loss.table.k", "word"], "trainer.loss.table", {"k": "word"}),
        (["--trainer.loss.inner.depth", "4"], "trainer.loss.inner.depth", 4),
        (["--trainer.loss.mode", "hard"], "trainer.loss.mode", "hard"),
        (["--trainer.loss", "probe_other"], "trainer.loss.power", 2.0),
        (["--trainer.loss.power", "3", "--trainer.loss.type", "probe-other"],
         "trainer.loss.power", 3.0),
        (["--stages.0.seq-len", "64"], "seq_len", 64),
        (["--rl.seq-len", "64"], "seq_len", 64),
    ],
)  # fmt: skip
def test_forms(load, words, path, expected):
    found = stage(load(PLAIN, *words))
    for part in path.split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize("words, step, skips", [
    (["--resume"], None, False),
    (["--resume", "12"], 12, False),
    (["--resume=12"], 12, False),
    (["--resume.step", "12", "--resume.skip-optimizer"], 12, True),
])  # fmt: skip
def test_resume_is_an_argument_and_reaches_the_stage(load, words, step, skips):
    loaded = load(PLAIN, *words, "--seed", "3")
    assert loaded.arguments.resume.step == step
    assert loaded.arguments.resume.skip_optimizer is skips
    assert stage(loaded).resume == loaded.arguments.resume
    assert stage(loaded).seed == 3


def test_run_options(load):
    arguments = load(PLAIN, "--clean", "--dry-run").arguments
    assert arguments.clean and arguments.dry_run and arguments.resume is None
    with pytest.raises(ConfigError, match="--clean deletes what --resume"):
        load(PLAIN, "--clean", "--resume")
    with pytest.raises(ConfigError, match="two recipes"):
        load(PLAIN, "other.toml")
    with pytest.raises(ConfigError, match="not both"):
        load(PLAIN, "--resume.step", "1", "--resume.dir", "x/step_1")


def test_files_are_merged_left_to_right_and_lists_replaced(load, tmp_path):
    (tmp_path / "b.toml").write_text(
        '[trainer.optim]\nlr = 0.5\n[trainer.loss]\nnames = ["b"]\ncount = 8\n'
    )
    (tmp_path / "c.toml").write_text(
        '[trainer.loss]\nnames = ["c", "d"]\n[trainer.optim]\neps = 0.1'
    )
    first = PLAIN.replace('type = "probe"', 'type = "probe"\nnames = ["x", "y", "z"]', 1)
    words = ["@", str(tmp_path / "b.toml"), "@", str(tmp_path / "c.toml")]
    loaded = load(first, *words, "--trainer.optim.eps", "0.25")
    assert stage(loaded).trainer.loss.names == ["c", "d"]
    assert stage(loaded).trainer.loss.count == 8
    assert stage(loaded).trainer.optim.lr == 0.5
    assert stage(loaded).trainer.optim.eps == 0.25
    assert [path.name for path in loaded.inputs] == ["recipe.toml", "b.toml", "c.toml"]


def test_only_at_files_and_section_files(load, tmp_path):
    (tmp_path / "whole.toml").write_text(PLAIN)
    (tmp_path / "part.toml").write_text('lr = 0.125\nmax_norm = "None"\n')
    words = ["@", str(tmp_path / "whole.toml"), "--trainer.optim", "@", str(tmp_path / "part.toml")]
    optim = stage(load(None, *words)).trainer.optim
    assert (optim.lr, optim.max_norm, optim.eps) == (0.125, None, 1e-8)


def test_none_and_empty_sections_in_files(load):
    loaded = load(PLAIN + '[ckpt]\n[trainer.optim]\nmax_norm = "None"\n')
    assert stage(loaded).ckpt is not None
    assert stage(loaded).trainer.optim.max_norm is None
    assert stage(load(PLAIN + "[ckpt]\n", "--ckpt", "None")).ckpt is None


def test_command_line_needs_no_section_in_the_file(load):
    """BL-057: no [log] and no [ckpt] table anywhere."""
    loaded = load(PLAIN, "--log.level", "debug", "--ckpt.keep-last", "2")
    assert stage(loaded).log.level == "debug"
    assert stage(loaded).ckpt.keep_last == 2


@pytest.mark.parametrize("written, words, expected", [
    (None, [], True),
    ("false", [], False),
    ("false", ["--trainer.loss.flag"], True),
    ("true", ["--no-trainer.loss.flag"], False),
    ("true", ["--trainer.loss.flag", "--trainer.loss.no-flag"], False),
    ("false", ["--no-trainer.loss.flag", "--trainer.loss.flag"], True),
    (None, ["--no-trainer.loss.flag", "--trainer.loss.flag=false"], False),
])  # fmt: skip
def test_booleans_that_are_true_by_default(load, written, words, expected):
    """BL-059: the last word on the command line wins; without one the file's value stays."""
    text = PLAIN + (
        f"[trainer.loss.inner]\n[trainer.memory]\ncompile = {written}" if written else ""
    )
    text = (
        text.replace('type = "probe"', f'type = "probe"\nflag = {written}', 1) if written else text
    )
    assert stage(load(text, *words)).trainer.loss.flag is expected


def test_variant_keeps_its_own_default(load):
    """BL-056: the default of another variant is never carried over."""
    assert stage(load(PLAIN)).weight_broadcast.port == 29501
    other = load(PLAIN, "--weight-broadcast.type", "probe_other")
    assert stage(other).weight_broadcast.port == 29503
    set_before = load(PLAIN.replace("[weight_broadcast]", "[weight_broadcast]\nport = 7"),
                      "--weight-broadcast", "probe_other")  # fmt: skip
    assert stage(set_before).weight_broadcast.port == 29503


def test_plugin_section_as_a_string(load):
    text = PLAIN.replace('[trainer.loss]\ntype = "probe"\n', '[trainer]\nloss = "probe_other"\n')
    assert stage(load(text)).trainer.loss.power == 2.0
    assert stage(load(text, "--trainer.loss.power", "4")).trainer.loss.power == 4.0


def test_stages_and_shared_keys(load, staged):
    sft, rl = load(staged).run.stages
    assert (sft.type, rl.type) == ("sft", "rl")
    assert (sft.seq_len, rl.seq_len) == (512, 512)
    assert (sft.trainer.optim.lr, rl.trainer.optim.lr) == (0.25, 0.5)
    assert (sft.trainer.optim.betas1, rl.trainer.optim.betas1) == (0.7, 0.7)
    assert sft.model.fresh is not None
    assert rl.model.fresh is None and rl.model.name is None
    assert rl.model.plugin == "probe_model"


def test_shared_override_reaches_every_stage(load, staged):
    """BL-055: the command line beats what a stage's own table says."""
    words = ["--seq-len", "1024", "--trainer.optim.lr", "0.125", "--stages.1.max-steps", "8",
             "--sft.trainer.optim.eps", "0.5"]  # fmt: skip
    sft, rl = load(staged, *words).run.stages
    assert (sft.seq_len, rl.seq_len) == (1024, 1024)
    assert (sft.trainer.optim.lr, rl.trainer.optim.lr) == (0.125, 0.125)
    assert (sft.max_steps, rl.max_steps) == (3, 8)
    assert (sft.trainer.optim.eps, rl.trainer.optim.eps) == (0.5, 1e-8)


def test_shared_override_reaches_stages_that_have_the_key(load, staged):
    sft, rl = load(staged, "--orchestrator.batch-size", "16", "--data.batch-size", "3").run.stages
    assert rl.orchestrator.batch_size == 16
    assert sft.data.batch_size == 3


def test_stage_addressed_by_its_own_name(load, staged):
    named = staged.replace('type = "sft"', 'type = "sft"\nname = "warm-up"')
    sft, rl = load(named, "--warm-up.seed", "4").run.stages
    assert (sft.seed, rl.seed) == (4, 0)


def test_later_file_beats_earlier_files_stages(load, staged, tmp_path):
    (tmp_path / "late.toml").write_text("[trainer.optim]\nlr = 0.0625\n")
    sft, rl = load(staged, "@", str(tmp_path / "late.toml")).run.stages
    assert (sft.trainer.optim.lr, rl.trainer.optim.lr) == (0.0625, 0.0625)


def test_model_name_is_for_the_first_stage(load, staged, tmp_path):
    words = ["--model.name", str(tmp_path), "--model.fresh", "None"]
    sft, rl = load(staged, *words).run.stages
    assert (sft.model.name, rl.model.name) == (str(tmp_path), None)


GROUP = """
[orchestrator.train]
group_size = 4
[orchestrator.train.env.taskset]
id = "words"
length = 5
[orchestrator.train.sampling]
temperature = 0.5
top_p = 0.75
[orchestrator.train.algo]
type = "probe"
[[orchestrator.train.source]]
[[orchestrator.train.source]]
name = "short"
group_size = 2
env.taskset.length = 3
sampling.temperature = 0.25
[[orchestrator.train.source]]
env.taskset.id = "other"
algo.type = "probe_prompt"
"""


def grouped(load, *words):
    text = PLAIN.replace('[[orchestrator.train.source]]\nenv.taskset.id = "words"\n', GROUP)
    return stage(load(text, "--orchestrator.batch-size", "8", *words)).orchestrator.train.source


def test_sources_inherit_key_by_key(load):
    first, short, other = grouped(load)
    assert first.env == {"taskset": {"id": "words", "length": 5}}
    assert short.env == {"taskset": {"id": "words", "length": 3}}
    assert other.env == {"taskset": {"id": "other"}}
    assert [one.group_size for one in (first, short, other)] == [4, 2, 4]
    assert [one.sampling.temperature for one in (first, short, other)] == [0.5, 0.25, 0.5]
    assert [one.sampling.top_p for one in (first, short, other)] == [0.75, 0.75, 0.75]
    assert [one.algo.type for one in (first, short, other)] == ["probe", "probe", "probe_prompt"]


def test_group_override_reaches_every_source(load):
    sources = grouped(load, "--orchestrator.train.sampling.temperature", "0.125",
                      "--orchestrator.train.group-size", "1")  # fmt: skip
    assert [one.sampling.temperature for one in sources] == [0.125] * 3
    assert [one.group_size for one in sources] == [1] * 3
    one = grouped(load, "--orchestrator.train.source.0.group-size", "8")
    assert [source.group_size for source in one] == [8, 2, 4]


def test_source_can_be_appended(load):
    words = ["--orchestrator.train.source.3.env.taskset.id", "fourth"]
    sources = grouped(load, *words)
    assert [source.label for source in sources] == ["words", "short", "other", "fourth"]


def test_auto_values(load, staged):
    sft, rl = load(staged, "--rl.trainer.enable-router-replay").run.stages
    assert (sft.trainer.optim.weight_decay, rl.trainer.optim.weight_decay) == (0.01, 0.0)
    assert (sft.model.moe.freeze_router, rl.model.moe.freeze_router) == (False, True)
    assert rl.model.moe.router_dtype == "float32"
    assert rl.inference.return_routed_experts is True
    assert sft.inference.return_routed_experts is False
    assert rl.inference.max_model_len == 512
    assert rl.trainer.device == "auto"


def test_written_values_are_not_overruled(load):
    loaded = load(PLAIN, "--trainer.optim.weight-decay", "0.25", "--inference.max-model-len", "99",
                  "--run.name", "mine")  # fmt: skip
    assert stage(loaded).trainer.optim.weight_decay == 0.25
    assert stage(loaded).inference.max_model_len == 99
    assert loaded.run.run.name == "mine"


def test_automatic_name(load, staged):
    import re

    names = {load(staged).run.run.name for _ in range(4)}
    assert len(names) == 4
    assert all(re.fullmatch(r"rows\+words--probe_model--[0-9a-f]{8}", name) for name in names)


def test_no_warnings_are_emitted(load, recwarn):
    load(PLAIN, "--trainer.loss.eps", "1").run.model_dump_json()
    assert [str(warning.message) for warning in recwarn] == []


def test_a_switch_that_only_some_stages_have_reaches_those(load, staged):
    run = load(staged, "--no-eval-before").run
    assert [one.eval_before for one in run.stages if one.type == "sft"] == [False]


def test_a_schedule_with_an_end_must_fit_into_the_run(load):
    cosine = ["--trainer.schedule.type", "cosine", "--max-steps", "20"]
    with pytest.raises(ConfigError, match="warmup_steps 30 .* exceed max_steps"):
        load(PLAIN, *cosine, "--trainer.schedule.warmup-steps", "30")
    loaded = load(PLAIN, *cosine, "--trainer.schedule.warmup-steps", "20")
    assert stage(loaded).trainer.schedule.warmup_steps == 20
    short = load(PLAIN, "--trainer.schedule.warmup-steps", "30", "--max-steps", "20")
    assert stage(short).max_steps == 20
