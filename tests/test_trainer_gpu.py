"""The trainer on an accelerator: bfloat16 over float32 weights, sharded as one rank."""

from __future__ import annotations

import pytest
import torch
from trainer_world import (
    MOE,
    ScriptedOrchestrator,
    changed,
    make_run,
    metrics_of,
    random_micro_batch,
)

from prime_rl.configs.paths import stage_paths
from prime_rl.trainer.main import run_trainer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]

OPTIM = {"optim": {"lr": 3e-3}, "schedule": {"type": "constant"}}


def losses(run):
    return [row["loss/mean"] for row in metrics_of(run)]


@pytest.mark.parametrize(
    "memory", [{}, {"activation_checkpointing": "full"}, {"compile": True}], ids=str
)
@pytest.mark.parametrize("architecture", [None, MOE], ids=["dense", "moe"])
def test_fine_tuning_follows_the_cpu(tmp_path, memory, architecture):
    runs = {}
    for device in ("cpu", "cuda"):
        trainer = {**OPTIM, "device": device}
        if device == "cuda":
            trainer["memory"] = memory
        runs[device] = make_run(
            tmp_path / device, "sft", architecture, max_steps=5, trainer=trainer
        )
        run_trainer(runs[device], 0)
    assert losses(runs["cuda"]) == pytest.approx(losses(runs["cpu"]), rel=0.02)
    row = metrics_of(runs["cuda"])[-1]
    assert row["perf/mfu"] > 0 and row["perf/peak_memory"] > 0


def test_export_is_in_the_compute_dtype_and_resume_continues(tmp_path):
    import transformers

    run = make_run(tmp_path / "a", "sft", max_steps=4, trainer=OPTIM, ckpt={"interval": 2})
    run_trainer(run, 0)
    export = stage_paths(run, 0).export
    model = transformers.AutoModelForCausalLM.from_pretrained(export)
    assert model.dtype == torch.bfloat16
    fork = make_run(tmp_path / "b", "sft", max_steps=4, trainer=OPTIM)
    fork = changed(fork, resume={"dir": str(stage_paths(run, 0).checkpoint(2))})
    run_trainer(fork, 0)
    assert losses(fork) == pytest.approx(losses(run)[2:], rel=1e-3)


@pytest.mark.parametrize("architecture", [None, MOE], ids=["dense", "moe"])
def test_rl_follows_the_cpu(tmp_path, architecture):
    rows = {step: [random_micro_batch(step, 60, [9, 5, 12])] for step in (1, 2, 3)}
    found = {}
    for device in ("cpu", "cuda"):
        trainer = {**OPTIM, "device": device}
        run = make_run(tmp_path / device, "rl", architecture, max_steps=3, trainer=trainer)
        orchestrator = ScriptedOrchestrator(run, rows)
        try:
            run_trainer(run, 0)
        finally:
            orchestrator.close()
        assert orchestrator.versions == [0, 1, 2, 3]
        found[device] = [row["entropy/all"] for row in metrics_of(run)]
    assert found["cuda"] == pytest.approx(found["cpu"], rel=0.02)
