"""The saved run: everything in it, and equal to the run when read back."""

from __future__ import annotations

import json
import random

import pytest

from prime_rl.cli.config import as_toml
from prime_rl.configs.load import load_resolved, save_resolved
from prime_rl.configs.resolve import resolve, resolve_devices
from prime_rl.errors import ConfigError, PluginError


def test_plugin_fields_and_nulls_are_kept(load, flat, registry, tmp_path):
    """OWN-6: a field typed with the base class alone would be dumped without them."""
    words = ["--trainer.loss.eps", "0.75", "--trainer.loss.table", '{"a": [1, null]}',
             "--trainer.loss.inner.depth", "3", "--trainer.optim.max-norm", "None"]  # fmt: skip
    run = load(flat, *words).run
    path = tmp_path / "deep" / "run.json"
    save_resolved(run, path)
    saved = json.loads(path.read_text())
    loss = saved["stages"][0]["trainer"]["loss"]
    assert loss == {
        "type": "probe", "eps": 0.75, "count": 3, "flag": True, "mode": None, "names": [],
        "table": {"a": [1, None]}, "pair": [1, 2], "inner": {"depth": 3},
    }  # fmt: skip
    assert saved["stages"][0]["trainer"]["optim"]["max_norm"] is None
    assert saved["stages"][0]["orchestrator"]["train"]["source"][0]["algo"]["type"] == "grpo"
    assert saved["stages"][0]["weight_broadcast"] == {"type": "probe", "port": 29501}
    assert load_resolved(path, registry) == run
    assert [entry.name for entry in path.parent.iterdir()] == ["run.json"]


def test_versions_of_everything_that_was_resolved(load, flat, registry):
    run = load(flat).run
    versions = {(row["kind"], row["name"]): row["version"] for row in run.plugin_versions}
    assert versions["loss", "probe"] == "1.0"
    assert versions["model", "probe_model"] == "1.0"
    assert ("core", "prime-rl") in versions
    registry.verify_table(run.plugin_versions)
    with pytest.raises(PluginError, match="probe"):
        registry.verify_table([{**row, "version": "0.0"} for row in run.plugin_versions])


CHOICES = {
    "seq_len": ["2", "100000"],
    "seed": ["0", "17"],
    "trainer.loss.eps": ["1e-300", "0.1", "7"],
    "trainer.loss.mode": ["None", "hard"],
    "trainer.loss.names": ['["", "x"]', "[]"],
    "trainer.loss.table": ['{"a": {"b": [1, 2.5, null, true, "t"]}}', "{}"],
    "trainer.loss.pair": ["[3, 4]"],
    "trainer.optim.type": ["adamw", "sign_sgd"],
    "trainer.optim.lr": ["1e-3", "0.1"],
    "trainer.optim.weight-decay": ["auto", "0.5"],
    "trainer.optim.max-norm": ["None", "2"],
    "trainer.schedule.type": ["linear", "cosine", "constant"],
    "trainer.gc-interval": ["None", "3"],
    "weight-broadcast": ["probe", "probe_other"],
    "ckpt.interval": ["None", "5"],
    "model.options.rope-base": ["5", "1e6"],
    "model.moe.freeze-router": ["true", "false", "auto"],
    "inference.max-model-len": ["None", "77"],
    "orchestrator.train.sampling.top-k": ["None", "5"],
    "orchestrator.train.source.0.select.exclude": ["[]", "[1, 5]"],
    "env-vars": ['{"A": "1"}'],
    "run.dir": ["None", "a/b"],
}


@pytest.mark.parametrize("seed", range(40))
def test_saved_run_reads_back_equal(load, flat, registry, tmp_path, seed):
    generator = random.Random(seed)
    words = ["--run.name", "fixed", "--max-steps", "25"]
    for key in generator.sample(sorted(CHOICES), 10):
        words += [f"--{key}", generator.choice(CHOICES[key])]
    run = load(flat, *words).run
    save_resolved(run, tmp_path / "run.json")
    again = load_resolved(tmp_path / "run.json", registry)
    assert again == run
    assert [type(stage.trainer.loss) for stage in again.stages] == [
        type(run.stages[0].trainer.loss)
    ]
    assert resolve(again) == again
    shown = load(as_toml(run)).run
    assert shown.stages == run.stages and shown.run == run.run


def test_switches_of_the_run_apply_when_it_is_read(load, flat, registry, tmp_path):
    run = load(flat, "--no-plugin", "probe_other").run
    assert run.stages[0].plugins.deny == ["probe_other"]
    path = tmp_path / "run.json"
    save_resolved(run, path)
    saved = json.loads(path.read_text())
    saved["stages"][0]["trainer"]["loss"] = {"type": "probe_other"}
    path.write_text(json.dumps(saved))
    with pytest.raises(ConfigError, match="switched off"):
        load_resolved(path, registry)


@pytest.mark.parametrize("content", ["", "[]", "{", '{"stages": []}', '{"stages": [{}], "x": NaN}'])
def test_damaged_saved_run(registry, tmp_path, content):
    (tmp_path / "run.json").write_text(content)
    with pytest.raises(ConfigError, match="run.json"):
        load_resolved(tmp_path / "run.json", registry)
    with pytest.raises(ConfigError, match="missing.json"):
        load_resolved(tmp_path / "missing.json", registry)


def test_values_that_depend_on_the_machine(load, staged):
    run = load(staged).run
    for has_cuda, device, dtype in ((False, "cpu", "float32"), (True, "cuda", "bfloat16")):
        sft, rl = resolve_devices(run, has_cuda).stages
        assert (sft.trainer.device, rl.inference.device) == (device, device)
        assert (sft.model.compute_dtype, sft.model.moe.router_dtype) == (dtype, dtype)
        assert rl.model.moe.router_dtype == "float32"
    fixed = load(staged, "--trainer.device", "cpu").run
    assert resolve_devices(fixed, True).stages[0].model.compute_dtype == "float32"
    assert resolve_devices(fixed, True).stages[0].inference.device == "cuda"
