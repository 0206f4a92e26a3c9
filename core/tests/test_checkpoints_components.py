"""Checkpoints count only when whole: torn, missing and out-of-order parts of every sort."""

from __future__ import annotations

import json
import logging

import pytest

from prime_rl.configs.model import CheckpointConfig
from prime_rl.configs.paths import StagePaths
from prime_rl.control import checkpoints
from prime_rl.control.checkpoints import ComponentCheckpoint
from prime_rl.errors import CheckpointError

BOTH = ("trainer", "orchestrator")


def save(paths, step, components=BOTH, text="state"):
    def write(folder):
        (folder / "deep").mkdir()
        (folder / "deep" / "weights.bin").write_bytes(b"x" * 100)
        (folder / "state.json").write_text(json.dumps({"text": text}))

    for component in components:
        ComponentCheckpoint(paths).commit(step, component, write)


@pytest.fixture
def paths(tmp_path):
    return StagePaths(tmp_path)


def test_newest_is_by_number_not_by_name(paths):
    for step in (9, 100, 10):
        save(paths, step)
    assert checkpoints.complete_steps(paths, BOTH) == [9, 10, 100]
    assert checkpoints.resolve_step(paths, BOTH, None) == 100


def lack_component(directory):
    (directory / "orchestrator.done").unlink()


def lack_file(directory):
    (directory / "trainer" / "deep" / "weights.bin").unlink()


def truncate_file(directory):
    (directory / "trainer" / "deep" / "weights.bin").write_bytes(b"x" * 99)


def tear_marker(directory):
    marker = directory / "trainer.done"
    marker.write_bytes(marker.read_bytes()[:10])


def garble_marker(directory):
    (directory / "trainer.done").write_bytes(b"\xff\xfe[]")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lack_component, "orchestrator was never finished"),
        (lack_file, "trainer/deep/weights.bin is missing"),
        (truncate_file, "trainer/deep/weights.bin has 99 bytes instead of 100"),
        (tear_marker, "trainer.done is damaged"),
        (garble_marker, "trainer.done is damaged"),
    ],
)
def test_incomplete_newest_is_passed_over_and_named(paths, caplog, damage, named):
    save(paths, 20)
    save(paths, 30)
    damage(paths.checkpoint(30))
    with caplog.at_level(logging.WARNING):
        assert checkpoints.resolve_step(paths, BOTH, None) == 20
    assert "step 30" in caplog.text and named in caplog.text
    with pytest.raises(CheckpointError, match="step 30") as error:
        checkpoints.resolve_step(paths, BOTH, 30)
    assert named in str(error.value) and "Complete checkpoints: 20" in str(error.value)
    with pytest.raises(CheckpointError, match="step_30"):
        checkpoints.check_directory(paths.checkpoint(30), BOTH)


def test_never_silently_at_zero(paths):
    save(paths, 5, components=["trainer"])
    with pytest.raises(CheckpointError, match="orchestrator was never finished"):
        checkpoints.resolve_step(paths, BOTH, None)
    assert checkpoints.resolve_step(paths, ["trainer"], None) == 5


def test_killed_while_writing_leaves_the_former_part(paths):
    save(paths, 5, text="first")
    folder = ComponentCheckpoint(paths).begin(5, "trainer")
    (folder / "state.json").write_text("half")
    assert checkpoints.complete_steps(paths, BOTH) == [5]
    save(paths, 5, components=["trainer"], text="second")
    state = json.loads((paths.checkpoint(5) / "trainer" / "state.json").read_text())
    assert state == {"text": "second"} and checkpoints.complete_steps(paths, BOTH) == [5]


def test_fork_needs_a_step_folder(paths, tmp_path):
    save(paths, 7)
    assert checkpoints.check_directory(paths.checkpoint(7), BOTH) == 7
    (tmp_path / "final").mkdir()
    with pytest.raises(CheckpointError, match="step_<number>"):
        checkpoints.check_directory(tmp_path / "final", BOTH)


@pytest.mark.parametrize(
    ("max_steps", "resumed_after", "expected"),
    [(20, 0, [10, 20]), (25, 0, [10, 20, 25]), (25, 10, [20, 25]), (20, 20, [])],
)
def test_saved_at_the_interval_and_once_at_the_end(max_steps, resumed_after, expected):
    config = CheckpointConfig(interval=10)
    steps = range(resumed_after, max_steps + 1)
    due = [s for s in steps if s and checkpoints.is_due(s, config, max_steps, resumed_after)]
    assert due == expected


def test_without_interval_only_the_last_and_without_section_never():
    assert [s for s in range(1, 6) if checkpoints.is_due(s, CheckpointConfig(), 5)] == [5]
    assert [s for s in range(1, 6) if checkpoints.is_due(s, None, 5)] == []


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ({}, [2, 4, 6, 8, 10]),
        ({"keep_last": 2}, [8, 10]),
        ({"keep_last": 1, "keep_interval": 4}, [4, 8, 10]),
        ({"keep_interval": 4}, [4, 8, 10]),
    ],
)
def test_retention_keeps_the_union_and_counts_complete_ones(paths, settings, kept):
    for step in (2, 4, 6, 8, 10):
        save(paths, step)
    save(paths, 12, components=["trainer"])
    checkpoints.apply_retention(paths, BOTH, CheckpointConfig(**settings))
    assert checkpoints.complete_steps(paths, BOTH) == kept
    assert paths.checkpoint(12).is_dir(), "the orchestrator may still be writing its part"


def test_abandoned_future_goes(paths):
    for step in (2, 4, 10):
        save(paths, step)
    checkpoints.prune_beyond(paths, 4)
    assert checkpoints.complete_steps(paths, BOTH) == [2, 4]
