"""The loop with instant environments and a trainer in a thread: gates, staleness, signal, resume."""

import asyncio
import logging
import random
import re

import pytest
from orchestrator_world import InstantEnvironment, make_stage, run_world, spread_rewards

from prime_rl.errors import CheckpointError, RunError
from prime_rl.orchestrator.state import OrchestratorState
from prime_rl.traces import fold_annotations, read_episodes, read_metrics

EVAL = {"source": [{"name": "held", "env": {"taskset": {"id": "x"}}}], "interval": 2}
TRAIN = ("train", "words")


def headers(world):
    return {step: ranks[0].header for step, ranks in world.trainer.batches.items()}


def step_rows(world):
    return read_metrics(world.paths.metrics / "orchestrator.jsonl")


def eval_rows(world):
    return read_metrics(world.paths.metrics / "eval.jsonl")


def test_every_step_ships_once_in_order_and_the_last_version_is_taken(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=5))
    assert list(world.trainer.batches) == [1, 2, 3, 4, 5]
    assert [header.final for header in headers(world).values()] == [False] * 4 + [True]
    assert world.orchestrator.policy.version == 5
    assert [row["step"] for row in step_rows(world)] == [1, 2, 3, 4, 5]
    assert world.trainer.closed == ""


def test_tasks_come_in_order_and_each_once(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=4), delay_s=0.0)
    assert world.trained_tasks() == {
        step: [2 * step - 2] * 4 + [2 * step - 1] * 4 for step in range(1, 5)
    }


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_a_batch_ships_once_its_gate_version_is_published(tmp_path, lag):
    world = run_world(tmp_path, make_stage(max_steps=6, target_lag=lag), step_s=0.01)
    for step, header in headers(world).items():
        assert step - 1 - lag <= header.policy_version <= step - 1
    ages = [row["off_policy/max"] for row in step_rows(world)]
    assert max(ages) <= lag
    if lag == 0:
        assert ages == [0] * 6


@pytest.mark.parametrize("bound", [0, 1, 2])
def test_nothing_older_than_the_bound_ships(tmp_path, bound):
    stage = make_stage(
        max_steps=8,
        max_off_policy_steps=bound,
        target_lag=1,
        concurrency={"max_inflight": 40},
    )
    world = run_world(tmp_path, stage, delay_s=0.05)
    assert max(row["off_policy/max"] for row in step_rows(world)) <= bound
    dropped = sum(row["off_policy/dropped"] for row in step_rows(world))
    assert dropped > 0 or bound > 0


def test_engines_pause_before_the_payload_and_resume_after_the_update(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=2))
    expected = []
    for version in range(3):
        expected += ["pause", f"transfer {version}", f"update {version}", "resume"]
    assert world.engines.events == expected


def test_a_transport_that_needs_no_pause_gets_none(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=1), pauses_engines=False)
    assert world.engines.events == ["transfer 0", "update 0", "transfer 1", "update 1"]


def test_engines_resume_when_an_update_fails(tmp_path):
    async def break_update(orchestrator):
        async def update(version, directory):
            raise RunError("engine 0 refused")

        orchestrator._services.engines.update = update

    with pytest.raises(RunError, match="engine 0 refused") as caught:
        run_world(tmp_path, make_stage(max_steps=2), during=break_update)
    assert caught.value.world.engines.events[-1] == "resume"
    assert "engine 0 refused" in caught.value.world.trainer.closed


def mixed(task, draw):
    return draw.choice([0.0, 1.0, 0.5, "error", "refused", "truncated", "empty"])


def test_failures_are_outcomes_and_every_session_is_released(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.runner.FAILED_EPISODE_S", 0.0)
    world = run_world(tmp_path, make_stage(max_steps=4), replies={TRAIN: mixed})
    outcomes = {record["outcome"] for record in read_episodes(world.paths.traces)}
    assert outcomes == {"completed", "truncated", "error"}
    errors = {record["error"] for record in read_episodes(world.paths.traces)}
    assert errors == {
        "",
        "ProviderError: overloaded",
        "EpisodeRefused: no such method",
        "EmptyEpisode: the episode ended without a sampled token",
    }
    assert sorted(world.released) == sorted(world.environments[TRAIN].opened)
    # A step whose batch was already waiting observed nothing and has no such figure.
    assert sum(row.get("train/agg/all/errors/mean", 0.0) for row in step_rows(world)) > 0


def test_numbers_that_are_none_never_reach_the_trainer(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("prime_rl.orchestrator.runner.FAILED_EPISODE_S", 0.0)

    def nan_sometimes(task, draw):
        return float("nan") if draw.random() < 0.2 else draw.random()

    world = run_world(tmp_path, make_stage(max_steps=3), replies={TRAIN: nan_sometimes})
    for batches in world.trainer.batches.values():
        for row in batches[0].micro_batches:
            values = memoryview(row.advantages).cast("f").tolist()
            assert all(value == value for value in values)
    errors = {record["error"] for record in read_episodes(world.paths.traces)}
    assert "DamagedEpisode: rewards [nan] are not all finite" in errors
    assert "episodes failed" in caplog.text


def test_a_hanging_episode_is_a_timeout_and_its_session_is_released(tmp_path):
    def hang_sometimes(task, draw):
        return "hang" if draw.random() < 0.1 else draw.random()

    stage = make_stage(max_steps=3, episode_timeout_s=0.05)
    world = run_world(tmp_path, stage, replies={TRAIN: hang_sometimes})
    records = list(read_episodes(world.paths.traces))
    timeouts = [record for record in records if record["outcome"] == "timeout"]
    assert timeouts and timeouts[0]["error"] == "EpisodeTimeout: not over after 0.05 s"
    assert sorted(world.released) == sorted(world.environments[TRAIN].opened)


def some_equal(task, draw):
    """Half of the tasks give every episode the same reward."""
    return 1.0 if task["number"] % 2 else draw.random()


def test_episodes_without_signal_are_backfilled(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=3), replies={TRAIN: some_equal})
    assert all(number % 2 == 0 for row in world.trained_tasks().values() for number in row)
    assert [row["batch/episodes"] for row in step_rows(world)] == [8, 8, 8]


def test_without_constant_batches_the_size_varies(tmp_path):
    stage = make_stage(max_steps=3, constant_batch_size=False)
    world = run_world(tmp_path, stage, replies={TRAIN: some_equal}, delay_s=0.0)
    assert [row["batch/episodes"] for row in step_rows(world)] == [4, 4, 4]
    assert world.trained_tasks() == {1: [0] * 4, 2: [2] * 4, 3: [4] * 4}


def test_a_batch_without_signal_is_followed_by_further_episodes(tmp_path):
    """Nothing is in flight when the empty batch is taken: the loop itself must start the next."""

    def first_batches_equal(task, draw):
        return 1.0 if task["number"] < 4 else draw.random()

    stage = make_stage(
        max_steps=2,
        constant_batch_size=False,
        target_lag=0,
        concurrency={"max_inflight": 8},
    )
    world = run_world(tmp_path, stage, replies={TRAIN: first_batches_equal}, delay_s=0.0)
    assert world.trained_tasks() == {1: [4] * 4 + [5] * 4, 2: [6] * 4 + [7] * 4}


def test_a_group_that_does_not_fit_whole_ships_its_rest_in_the_next_batch(tmp_path):
    def one_dead(task, draw):
        # Rewards 0, 0, 1, 1 and the middle: one episode of five sits exactly on the mean.
        return next(one_dead.rewards)

    import itertools

    one_dead.rewards = itertools.cycle([0.0, 0.0, 0.5, 1.0, 1.0])
    source = {"name": "words", "env": {"taskset": {"id": "x"}}, "group_size": 5}
    stage = make_stage(
        max_steps=3, batch_size=10, train={"source": [source]}, concurrency={"max_inflight": 5}
    )
    world = run_world(tmp_path, stage, replies={TRAIN: one_dead}, delay_s=0.0)
    assert world.trained_tasks() == {
        1: [0] * 4 + [1] * 4 + [2] * 2,
        2: [2] * 2 + [3] * 4 + [4] * 4,
        3: [5] * 4 + [6] * 4 + [7] * 2,
    }


@pytest.mark.parametrize("constant", [True, False])
def test_a_run_without_any_signal_ends_with_the_reason(tmp_path, caplog, constant):
    stage = make_stage(max_empty_batches=3, constant_batch_size=constant)
    with caplog.at_level(logging.WARNING), pytest.raises(RunError) as caught:
        run_world(tmp_path, stage, replies={TRAIN: lambda task, draw: "truncated"})
    text = str(caught.value)
    assert re.match(r"no training signal in [3-6] rounds", text) and "100% were cut off" in text
    assert text in caught.value.world.trainer.closed
    assert "truncation fraction 1.0, zero-variance fraction 1.0" in caplog.text
    assert caught.value.world.trainer.batches == {}


def test_a_run_of_errors_ends_with_the_last_error(tmp_path, monkeypatch):
    monkeypatch.setattr("prime_rl.orchestrator.runner.FAILED_EPISODE_S", 0.01)
    stage = make_stage(max_empty_batches=2)
    with pytest.raises(RunError, match="100% failed.*last error: ProviderError: overloaded"):
        run_world(tmp_path, stage, replies={TRAIN: lambda task, draw: "error"})


def test_evaluation_at_the_start_every_interval_and_at_the_end(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=5, eval=EVAL), tasks=10)
    rows = eval_rows(world)
    assert [row["step"] for row in rows] == [0, 2, 4, 5]
    assert [row["eval/held/policy_version"] for row in rows] == [0, 2, 4, 5]
    assert {row["eval/held/count"] for row in rows} == {10}
    skipped = {**EVAL, "skip_first_step": True}
    world = run_world(tmp_path / "b", make_stage(max_steps=2, eval=skipped), tasks=10)
    assert [row["step"] for row in eval_rows(world)] == [2]


@pytest.mark.parametrize("hold_s", [60.0, 0.0])
def test_weights_stay_while_a_short_evaluation_runs(tmp_path, monkeypatch, hold_s):
    monkeypatch.setattr("prime_rl.orchestrator.evaluate.HOLD_S", hold_s)
    evaluation = {**EVAL, "interval": 1}
    stage = make_stage(max_steps=3, eval=evaluation, concurrency={"max_inflight": 8})
    world = run_world(tmp_path, stage, tasks=12, delay_s=0.03)
    records = [r for r in read_episodes(world.paths.traces) if r["split"] == "eval"]
    assert len(records) == 4 * 12
    moved = [r for r in records if r["policy"]["start"] != r["policy"]["end"]]
    assert (not moved) if hold_s else moved


def test_episodes_carry_the_version_they_were_dispatched_with(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=4), step_s=0.01)
    records = list(read_episodes(world.paths.traces))
    groups: dict[int, set[int]] = {}
    for record in records:
        groups.setdefault(record["group"], set()).add(record["policy"]["start"])
        assert record["policy"]["start"] <= record["policy"]["end"]
    assert all(len(versions) == 1 for versions in groups.values())
    salts = {sampling["cache_salt"] for sampling in world.environments[TRAIN].samplings}
    assert salts <= {"0", "1", "2", "3", "4"} and "0" in salts


def test_advantages_are_annotated_with_null_off_the_mask(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=2))
    folded = fold_annotations(world.paths.traces)
    trained = [n for r in world.trainer.batches.values() for m in r[0].micro_batches
               for n in m.trace_ids]  # fmt: skip
    assert sorted(folded) == sorted(trained)
    for branches in folded.values():
        advantages = branches[0]["advantages"]
        assert advantages[:3] == [None] * 3 and None not in advantages[3:]


def test_logprobs_reach_the_trainer_unrounded(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=1))
    row = world.trainer.batches[1][0].micro_batches[0]
    values = memoryview(row.inference_logprobs).cast("f").tolist()
    assert sorted(set(values)) == pytest.approx([-0.123456789, 0.0], abs=1e-8)


def test_ranks_get_equal_numbers_of_rows(tmp_path):
    stage = make_stage(max_steps=2, trainer={"parallel": {"ranks": 3}})
    world = run_world(tmp_path, stage)
    for ranks in world.trainer.batches.values():
        assert len(ranks) == 3 and len({len(batch.micro_batches) for batch in ranks}) == 1


class Stopped(Exception):
    """Ends a run as a kill would."""


def stop_after(step):
    async def during(orchestrator):
        while orchestrator.progress.step <= step:
            await asyncio.sleep(0.001)
        orchestrator.dispatcher.failure = Stopped("killed")
        await asyncio.sleep(3600)

    return during


@pytest.mark.parametrize("delay_s", [0.0, 0.01])
def test_a_resumed_run_skips_nothing_and_trains_nothing_twice(tmp_path, delay_s):
    ckpt = {"interval": 1}
    settings = {"ckpt": ckpt, "max_steps": 6, "concurrency": {"max_inflight": 24}}
    with pytest.raises(Stopped) as caught:
        run_world(tmp_path, make_stage(**settings), delay_s=delay_s, during=stop_after(3))
    first = caught.value.world.trained_tasks()
    state = OrchestratorState.read(tmp_path / "checkpoints" / "step_2" / "orchestrator")
    second = run_world(
        tmp_path,
        make_stage(**settings),
        delay_s=delay_s,
        seed=1,
        resumed_after=2,
        state=state,
    )
    assert list(second.trainer.batches) == [3, 4, 5, 6]
    trained = [n for step in (1, 2) for n in first[step]]
    trained += [n for numbers in second.trained_tasks().values() for n in numbers]
    if delay_s == 0.0:
        assert sorted(trained) == sorted([n for n in range(12) for _ in range(4)])
    counts = {number: trained.count(number) for number in trained}
    assert set(counts.values()) == {4}
    assert second.engines.events[1] == "transfer 2"
    # Whatever was drawn and not trained is still open: nothing was skipped.
    order = second.orchestrator.source.state_dict()
    assert set(counts) | {entry[2] for entry in order["open"]} == set(range(order["drawn"]))
    salts = {s["cache_salt"] for s in second.environments[TRAIN].samplings}
    assert min(map(int, salts)) >= 2


def test_a_half_shipped_group_is_finished_after_a_resume(tmp_path):
    import itertools

    rewards = itertools.cycle([0.0, 0.0, 0.5, 1.0, 1.0])
    source = {"name": "words", "env": {"taskset": {"id": "x"}}, "group_size": 5}
    settings = {
        "max_steps": 3,
        "batch_size": 10,
        "train": {"source": [source]},
        "concurrency": {"max_inflight": 5},
        "ckpt": {"interval": 1},
    }
    replies = {TRAIN: lambda task, draw: next(rewards)}
    with pytest.raises(Stopped):
        run_world(
            tmp_path, make_stage(**settings), replies=replies, delay_s=0.0, during=stop_after(1)
        )
    state = OrchestratorState.read(tmp_path / "checkpoints" / "step_1" / "orchestrator")
    rewards = itertools.cycle([0.0, 0.0, 0.5, 1.0, 1.0])
    world = run_world(
        tmp_path,
        make_stage(**settings),
        replies={TRAIN: lambda task, draw: next(rewards)},
        delay_s=0.0,
        resumed_after=1,
        state=state,
    )
    assert world.trained_tasks() == {
        2: [2] * 2 + [3] * 4 + [4] * 4,
        3: [5] * 4 + [6] * 4 + [7] * 2,
    }
    assert 2 not in world.environments[TRAIN].tasks


def test_counters_and_evaluations_go_on_after_a_resume(tmp_path):
    settings = {"ckpt": {"interval": 1}, "max_steps": 4, "eval": EVAL}
    with pytest.raises(Stopped):
        run_world(tmp_path, make_stage(**settings), tasks=12, during=stop_after(2))
    evaluated = [row["step"] for row in read_metrics(tmp_path / "monitors/file/metrics/eval.jsonl")]
    state = OrchestratorState.read(tmp_path / "checkpoints" / "step_2" / "orchestrator")
    world = run_world(tmp_path, make_stage(**settings), tasks=12, resumed_after=2, state=state)
    rows = [row["step"] for row in eval_rows(world)]
    assert rows[: len(evaluated)] == evaluated
    assert sorted(rows) == [0, 2, 4]
    assert world.orchestrator.progress.total_episodes == 4 * 8


def test_other_sources_than_the_checkpoint_s_are_refused(tmp_path):
    stage = make_stage(ckpt={"interval": 1}, max_steps=1)
    run_world(tmp_path, stage)
    state = OrchestratorState.read(tmp_path / "checkpoints" / "step_1" / "orchestrator")
    other = {"source": [{"name": "sums", "env": {"taskset": {"id": "x"}}, "group_size": 4}]}
    with pytest.raises(CheckpointError, match=r"sources \['words'\], this run has \['sums'\]"):
        run_world(tmp_path, make_stage(train=other), resumed_after=1, state=state)


def test_damaged_state_is_refused(tmp_path):
    stage = make_stage(ckpt={"interval": 1}, max_steps=1)
    run_world(tmp_path, stage)
    folder = tmp_path / "checkpoints" / "step_1" / "orchestrator"
    good = (folder / "state.json").read_text()
    for text in ["", "{}", "[]", good.replace('"version": 1', '"version": 99')]:
        (folder / "state.json").write_text(text)
        with pytest.raises(CheckpointError):
            OrchestratorState.read(folder)


def test_the_final_checkpoint_is_written_once_and_none_at_the_resumed_step(tmp_path):
    run_world(tmp_path, make_stage(ckpt={"interval": 2}, max_steps=5))
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_2", "step_4", "step_5"]


def test_two_sources_share_by_ratio_and_keep_their_own_order(tmp_path):
    def source(name, ratio):
        return {"name": name, "env": {"taskset": {"id": name}}, "group_size": 4, "ratio": ratio}

    stage = make_stage(max_steps=10, train={"source": [source("a", 3.0), source("b", 1.0)]})
    world = run_world(tmp_path, stage)
    first, second = (world.environments["train", name].tasks for name in "ab")
    assert len(first) > len(second) > 0
    for tasks in (first, second):
        assert sorted(set(tasks)) == list(range(len(set(tasks))))
    rows = step_rows(world)
    assert sum(row.get("batch/a", 0) + row.get("batch/b", 0) for row in rows) == 80
    assert any("train/a/all/reward/mean" in row for row in rows)


def test_an_exception_of_ours_ends_the_run(tmp_path):
    def broken(task, draw):
        raise ZeroDivisionError("a fault in the orchestrator")

    with pytest.raises(ZeroDivisionError):
        run_world(tmp_path, make_stage(), replies={TRAIN: broken})


def test_saving_no_episodes_is_possible(tmp_path):
    world = run_world(tmp_path, make_stage(max_steps=1, save_episodes=False))
    assert not (world.paths.traces / "stream.jsonl").exists()
    assert len(step_rows(world)) == 1


def test_instant_environments_are_repeatable():
    first, second = (InstantEnvironment(seed=3) for _ in range(2))
    draws = [spread_rewards({}, each.draw) for each in (first, second)]
    assert draws[0] == draws[1] == random.Random(3).random()
