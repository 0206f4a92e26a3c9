"""1, 2 and 4 ranks on the same global batch: same losses and gradient norms; checkpoints move."""

from __future__ import annotations

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
    train,
)

from prime_rl.configs.paths import stage_paths
from prime_rl.control.checkpoints import complete_steps

OPTIM = {"optim": {"lr": 3e-3}, "schedule": {"type": "constant"}}
TOLERANCE = 1e-5
STEPS = 5


def parallel(ranks, **more):
    return {**OPTIM, "parallel": {"ranks": ranks, **more}}


def rows_of(step):
    """Four rows of unequal token counts for any number of ranks; the last is padding alone."""
    rows = [
        random_micro_batch(100 * step + part, 60, lengths)
        for part, lengths in enumerate([[9, 4], [3], [12, 2, 5]])
    ]
    return [*rows, random_micro_batch(100 * step + 3, 60, [6], trained=False)]


def compared(run):
    names = ("loss/mean", "optim/grad_norm", "mismatch_kl/all", "entropy/all")
    names += ("is_masked/mean", "is_clipped/mean")
    return [[row[name] for name in names if name in row] for row in metrics_of(run)]


def assert_same(found, expected):
    assert len(found) == len(expected)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, rel=TOLERANCE, abs=1e-8)


def train_rl(folder, ranks, architecture=None, loss="ipo", **more):
    trainer = {**parallel(ranks, **more), "loss": {"type": loss}}
    run = make_run(folder, "rl", architecture, max_steps=STEPS, trainer=trainer, seed=1)
    rows = {step: rows_of(step) for step in range(1, STEPS + 1)}
    orchestrator = ScriptedOrchestrator(run, rows, ranks)
    try:
        train(run, ranks)
    finally:
        orchestrator.close()
    assert orchestrator.versions[-1] == STEPS
    return run


@pytest.mark.slow
def test_any_number_of_ranks_computes_the_same(tmp_path):
    runs = {ranks: train_rl(tmp_path / str(ranks), ranks) for ranks in (1, 2, 4)}
    expected = compared(runs[1])
    assert len(expected) == STEPS
    for ranks in (2, 4):
        assert_same(compared(runs[ranks]), expected)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["icepop", "ppo", "cispo"])
def test_every_loss_is_the_same_on_two_ranks(tmp_path, loss):
    expected = compared(train_rl(tmp_path / "1", 1, loss=loss))
    assert_same(compared(train_rl(tmp_path / "2", 2, loss=loss)), expected)


@pytest.mark.slow
def test_replicas_and_experts_compute_the_same(tmp_path):
    """Two replicas of a model with experts and its own head against one rank."""
    expected = compared(train_rl(tmp_path / "1", 1, MOE))
    assert_same(compared(train_rl(tmp_path / "2", 2, MOE, dp_replicate=2)), expected)


@pytest.mark.slow
def test_divided_experts_compute_the_same(tmp_path):
    """Experts divided over two ranks, alone and inside two replicas, against one rank."""
    expected = compared(train_rl(tmp_path / "1", 1, MOE))
    assert_same(compared(train_rl(tmp_path / "2", 2, MOE, expert_parallel=2)), expected)
    four = train_rl(tmp_path / "4", 4, MOE, expert_parallel=2, dp_replicate=2)
    assert_same(compared(four), expected)


@pytest.mark.slow
def test_divided_experts_resume_undivided(tmp_path):
    """And the other way round; exports are the same."""
    trainer = parallel(2, expert_parallel=2)
    whole = make_run(tmp_path / "1", "sft", MOE, max_steps=4, trainer=trainer, ckpt={"interval": 2})
    train(whole, 2)
    alone = make_run(
        tmp_path / "2", "sft", MOE, max_steps=4, trainer=parallel(1), ckpt={"interval": 3}
    )
    alone = changed(alone, resume={"dir": str(stage_paths(whole, 0).checkpoint(2))})
    train(alone, 1)
    assert_same(compared(alone), compared(whole)[2:])
    again = make_run(tmp_path / "3", "sft", MOE, max_steps=4, trainer=trainer)
    again = changed(again, resume={"dir": str(stage_paths(alone, 0).checkpoint(3))})
    train(again, 2)
    assert_same(compared(again), compared(whole)[3:])
    exports = [
        load_file(stage_paths(run, 0).export / "model.safetensors") for run in (whole, again)
    ]
    assert exports[0].keys() == exports[1].keys()
    for name, tensor in exports[0].items():
        assert torch.allclose(tensor, exports[1][name], atol=1e-6), name


@pytest.mark.slow
def test_fine_tuning_resumes_on_another_number_of_ranks(tmp_path):
    """Saved by one rank and continued by two, and the other way round: the same numbers."""
    whole = make_run(tmp_path / "1", "sft", max_steps=4, trainer=parallel(1), ckpt={"interval": 2})
    train(whole, 1)
    assert complete_steps(stage_paths(whole, 0), ("trainer",)) == [2, 4]
    more = make_run(tmp_path / "2", "sft", max_steps=4, trainer=parallel(2), ckpt={"interval": 3})
    more = changed(more, resume={"dir": str(stage_paths(whole, 0).checkpoint(2))})
    train(more, 2)
    assert_same(compared(more), compared(whole)[2:])
    fewer = make_run(tmp_path / "3", "sft", max_steps=4, trainer=parallel(1))
    fewer = changed(fewer, resume={"dir": str(stage_paths(more, 0).checkpoint(3))})
    train(fewer, 1)
    assert_same(compared(fewer), compared(whole)[3:])
