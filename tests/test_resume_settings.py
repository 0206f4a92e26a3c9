"""Resuming a run with other settings: what is finished stays what it was, or may grow."""

from __future__ import annotations

import pytest
from trainer_world import changed, make_run

from prime_rl.configs.paths import StagePaths, stage_paths
from prime_rl.control.checkpoints import ComponentCheckpoint
from prime_rl.errors import ConfigError
from prime_rl.launch.sequence import (
    _write_finished,
    forget_beyond,
    is_finished,
    resolve_resume,
)


@pytest.fixture
def finished(tmp_path):
    """A stage that an earlier attempt completed after 4 steps."""
    run = make_run(tmp_path, "sft", max_steps=4)
    paths = stage_paths(run, 0)
    _write_finished(paths, run.stages[0], 1.0)
    return run, paths


def save_checkpoint(paths, step):
    ComponentCheckpoint(paths).commit(step, "trainer", lambda f: (f / "x").write_text("x"))


def test_the_same_settings_have_nothing_left_to_do(finished):
    run, _ = finished
    assert is_finished(run, 0)
    assert resolve_resume(run).stages[0].resume is None


def test_other_settings_are_refused_and_named(finished):
    run, _ = finished
    other = changed(run, seed=3, trainer={"optim": {"type": "adamw", "lr": 0.5}})
    with pytest.raises(ConfigError) as caught:
        resolve_resume(other)
    message = str(caught.value)
    assert "seed: was 0, now 3" in message
    assert "trainer.optim.lr: was 1e-06, now 0.5" in message
    assert "--run.name" in message


def test_more_steps_continue_from_the_last_checkpoint(finished):
    run, paths = finished
    longer = changed(run, max_steps=6)
    assert not is_finished(longer, 0)
    with pytest.raises(ConfigError, match="left no checkpoint to continue from"):
        resolve_resume(longer)
    save_checkpoint(paths, 4)
    assert resolve_resume(longer).stages[0].resume.step == 4


def test_fewer_steps_are_refused(finished):
    run, _ = finished
    with pytest.raises(ConfigError, match="max_steps: was 4, now 2"):
        resolve_resume(changed(run, max_steps=2))


def test_an_abandoned_future_is_removed_and_the_resumed_version_is_offered_anew(tmp_path):
    paths = StagePaths(tmp_path)
    for parent in (paths.broadcasts, paths.checkpoints, paths.rollouts):
        for step in (1, 2, 3, 10):
            (parent / f"step_{step}").mkdir(parents=True)
    forget_beyond(paths, 2)
    left = {p.name: {d.name for d in p.iterdir()} for p in (paths.broadcasts, paths.checkpoints)}
    assert left == {"broadcasts": {"step_1"}, "checkpoints": {"step_1", "step_2"}}
    assert {d.name for d in paths.rollouts.iterdir()} == {"step_1", "step_2"}
