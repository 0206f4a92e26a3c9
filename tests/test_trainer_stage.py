"""A whole trainer stage in this process: fine-tuning, RL, checkpoints, export, resume."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from trainer_world import (
    MOE,
    ScriptedOrchestrator,
    changed,
    make_run,
    metrics_of,
    random_micro_batch,
    run_trainer_process,
    start_trainer,
)

from prime_rl.configs.paths import stage_model_dir, stage_paths
from prime_rl.control.checkpoints import complete_steps
from prime_rl.errors import CheckpointError, ConfigError, RunError
from prime_rl.models.load import load_weights
from prime_rl.models.setup import build, prepare
from prime_rl.plugins import scan
from prime_rl.trainer.main import run_trainer

OPTIM = {"optim": {"lr": 3e-3}, "schedule": {"type": "cosine", "warmup_steps": 1}}
VOCABULARY = 64


def losses(run):
    return [row["loss/mean"] for row in metrics_of(run)]


@pytest.fixture(scope="module")
def sft_run(tmp_path_factory):
    """Six steps of fine-tuning with a checkpoint every two."""
    folder = tmp_path_factory.mktemp("sft")
    run = make_run(folder, "sft", max_steps=6, trainer=OPTIM, ckpt={"interval": 2}, seed=5)
    run_trainer(run, 0)
    return run


def test_fine_tuning_learns_and_reports(sft_run):
    rows = metrics_of(sft_run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    assert rows[-1]["loss/mean"] < rows[0]["loss/mean"] - 0.2
    assert rows[-1]["progress/total_samples"] == 6 * 12
    for name in ("optim/lr", "optim/grad_norm", "perf/throughput", "perf/mfu", "time/step"):
        assert rows[-1][name] > 0, name
    assert complete_steps(stage_paths(sft_run, 0), ("trainer",)) == [2, 4, 6]


@pytest.mark.parametrize("resumed_after", [2, 4])
def test_resume_continues_with_the_same_data_and_numbers(sft_run, tmp_path, resumed_after):
    """A fork of the checkpoint into another run trains the same steps to the same bits."""
    fork = make_run(tmp_path, "sft", max_steps=6, trainer=OPTIM, ckpt={}, seed=5)
    checkpoint = stage_paths(sft_run, 0).checkpoint(resumed_after)
    run_trainer(changed(fork, resume={"dir": str(checkpoint)}), 0)
    assert losses(fork) == losses(sft_run)[resumed_after:]
    last = metrics_of(fork)[-1]
    assert last["optim/lr"] == metrics_of(sft_run)[-1]["optim/lr"]
    assert last["progress/total_samples"] == 6 * 12
    ours, theirs = (weights_of(run) for run in (fork, sft_run))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def weights_of(run):
    return load_file(stage_paths(run, 0).export / "model.safetensors")


def test_skips_start_afresh(sft_run, tmp_path):
    fork = make_run(tmp_path, "sft", max_steps=6, trainer=OPTIM, seed=5)
    resume = {
        "dir": str(stage_paths(sft_run, 0).checkpoint(4)),
        "skip_optimizer": True,
        "skip_scheduler": True,
        "skip_dataloader": True,
    }
    run_trainer(changed(fork, resume=resume), 0)
    first, whole = metrics_of(fork)[0], metrics_of(sft_run)
    assert first["step"] == 5
    assert first["optim/lr"] == whole[0]["optim/lr"]
    assert first["loss/mean"] < whole[0]["loss/mean"], "the weights did come from the checkpoint"


def test_damaged_checkpoint_is_refused_when_asked_for(sft_run):
    with pytest.raises(CheckpointError, match="cannot resume after step 3"):
        run_trainer(changed(sft_run, resume={"step": 3}), 0)


def test_checkpoint_of_another_model_is_refused(sft_run, tmp_path):
    other = make_run(tmp_path, "sft", {"hidden_size": 16}, max_steps=6)
    resume = {"dir": str(stage_paths(sft_run, 0).checkpoint(4))}
    with pytest.raises(CheckpointError, match="does not fit"):
        run_trainer(changed(other, resume=resume), 0)


@pytest.mark.parametrize("frozen", [True, False])
def test_a_router_stays_as_frozen_as_its_checkpoint_says(tmp_path, frozen):
    settings = {"max_steps": 2, "trainer": OPTIM, "ckpt": {}, "seed": 5}
    moe = {"moe": {"freeze_router": frozen}}
    run = make_run(tmp_path / "first", "sft", MOE, model=moe, **settings)
    run_trainer(run, 0)
    gates = [name for name in weights_of(run) if name.endswith("mlp.gate.weight")]
    before = load_file(stage_model_dir(run, 0) / "model.safetensors")
    assert len(gates) == 2
    assert all(weights_of(run)[name].equal(before[name]) == frozen for name in gates)
    resume = {"dir": str(stage_paths(run, 0).checkpoint(2))}
    settings["max_steps"] = 3
    moe = {"moe": {"freeze_router": not frozen}}
    other = make_run(tmp_path / "second", "sft", MOE, model=moe, **settings)
    expected = "other parameters are frozen.*keep model.moe.freeze_router.*resume.skip_optimizer"
    with pytest.raises(CheckpointError, match=expected):
        run_trainer(changed(other, resume=resume), 0)
    run_trainer(changed(other, resume=resume | {"skip_optimizer": True}), 0)
    assert [row["step"] for row in metrics_of(other)] == [3]


def test_export_gives_the_same_logits_in_transformers(sft_run):
    """Trained weights through our module and through transformers."""
    import transformers

    export = stage_paths(sft_run, 0).export
    setup = prepare(sft_run.stages[0].model, export, scan())
    module = build(setup, "cpu")
    load_weights(module, setup.layout, export)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32)
    assert transformers.AutoTokenizer.from_pretrained(export).encode("abc")
    from prime_rl.api import PackedBatch

    ids = list(range(3, 20))
    with torch.no_grad():
        ours = module(PackedBatch.from_documents([ids])) @ module.embed_tokens.weight.T
        expected = theirs(torch.tensor([ids])).logits[0]
    torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-5)
    assert json.loads((export / "config.json").read_text())["dtype"] == "float32"
    before = stage_model_dir(sft_run, 0)
    assert not weights_equal(export, before)


def weights_equal(one, other):
    first, second = (load_file(path / "model.safetensors") for path in (one, other))
    return all(first[name].equal(second[name]) for name in first)


def test_unknown_renderer_stops_before_training(tmp_path):
    run = make_run(tmp_path, "sft", max_steps=1)
    with pytest.raises(ConfigError, match="does not tell sampled tokens"):
        run_trainer(changed(run, tokenizer={"name": None, "renderer": "default"}), 0)


def rl_rows(steps, start=1):
    return {
        step: [random_micro_batch(10 * step + part, VOCABULARY, [7, 5 + part]) for part in range(2)]
        for step in range(start, start + steps)
    }


def train_rl(run, rows):
    """Train in this process beside a scripted orchestrator; the versions it took."""
    orchestrator = ScriptedOrchestrator(run, rows)
    try:
        run_trainer(run, 0)
    finally:
        orchestrator.close()
    return orchestrator.versions


@pytest.mark.parametrize("transport", ["zmq", "filesystem"])
def test_rl_publishes_every_version_and_annotates(tmp_path, transport):
    run = make_run(
        tmp_path, "rl", max_steps=3, trainer=OPTIM, orchestrator={"batch_transport": transport}
    )
    assert train_rl(run, rl_rows(3)) == [0, 1, 2, 3]
    rows = metrics_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("entropy/words", "mismatch_kl/all", "kl_ent_ratio/mean", "is_masked/mean"):
        assert name in rows[0], name
    lines = (
        (stage_paths(run, 0).traces / "annotations" / "trainer_0.jsonl").read_text().splitlines()
    )
    records = [json.loads(line) for line in lines]
    assert len(records) == 3 * 4
    branch = records[0]["branches"][0]
    assert {"entropies", "trainer_logprobs", "mismatch_kl", "is_masked"} <= set(branch)
    assert len(branch["entropies"]) == 7 and branch["entropies"][0] is None


def test_rl_resumes_at_the_version_of_its_checkpoint(tmp_path):
    """The first version after a resume at N is N, the next batch N + 1, the numbers the same."""
    whole = make_run(tmp_path / "whole", "rl", max_steps=4, trainer=OPTIM, ckpt={"interval": 2})
    train_rl(whole, rl_rows(4))
    done = stage_paths(whole, 0).checkpoint(2)
    folder = done / "orchestrator"
    from prime_rl.control.checkpoints import ComponentCheckpoint

    ComponentCheckpoint(stage_paths(whole, 0)).commit(2, "orchestrator", lambda path: None)
    assert folder.is_dir()
    fork = make_run(tmp_path / "fork", "rl", max_steps=4, trainer=OPTIM)
    fork = changed(fork, resume={"dir": str(done)})
    assert train_rl(fork, rl_rows(2, start=3)) == [2, 3, 4]
    assert losses(fork) == losses(whole)[2:]


def test_router_is_frozen_in_rl_and_trains_in_fine_tuning(tmp_path):
    rl = make_run(tmp_path / "rl", "rl", MOE, max_steps=2, trainer=OPTIM)
    train_rl(rl, rl_rows(2))
    sft = make_run(tmp_path / "sft", "sft", MOE, max_steps=2, trainer=OPTIM)
    run_trainer(sft, 0)
    for run, is_frozen in ((rl, True), (sft, False)):
        from safetensors.torch import load_file

        before = load_file(stage_model_dir(run, 0) / "model.safetensors")
        after = weights_of(run)
        routers = [name for name in before if name.endswith("mlp.gate.weight")]
        assert routers
        assert all(before[name].equal(after[name]) == is_frozen for name in routers)
        assert not before["lm_head.weight"].equal(after["lm_head.weight"])
        assert metrics_of(run)[-1]["max_vio/mean"] > 0


def test_silent_engines_are_an_error_in_time(tmp_path):
    run = make_run(tmp_path, "rl", max_steps=1, weight_broadcast_timeout_s=0.3)
    with pytest.raises(RunError, match="version 0 could not be published.*engines alive"):
        run_trainer(run, 0)


@pytest.mark.slow
def test_trainer_process_says_what_is_wrong_and_ends_on_request(tmp_path):
    """Without an orchestrator: a message without traceback and exit code 1; SIGTERM ends at once."""
    import time

    run = make_run(tmp_path, "rl", max_steps=1, weight_broadcast_timeout_s=0.5)
    process = start_trainer(run)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "version 0 could not be published" in output and "Traceback" not in output
    waiting = start_trainer(changed(run, weight_broadcast_timeout_s=600.0))
    deadline = time.monotonic() + 60
    while not stage_paths(run, 0).broadcasts.is_dir() and time.monotonic() < deadline:
        time.sleep(0.1)
    time.sleep(0.5)
    waiting.terminate()
    started = time.monotonic()
    waiting.communicate(timeout=30)
    assert time.monotonic() - started < 5 and waiting.returncode != 0


@pytest.mark.slow
def test_wrong_number_of_ranks_is_refused(tmp_path):
    run = make_run(tmp_path, "sft", max_steps=1, trainer={"parallel": {"ranks": 2}})
    process = start_trainer(run)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and "trainer.parallel.ranks is 2, but 1 ranks" in output
    assert run_trainer_process(run, ranks=2)
