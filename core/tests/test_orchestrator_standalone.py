"""One evaluation without training, and what happens when the other side never comes."""

import asyncio

import pytest
from orchestrator_world import InstantEnvironment, RecordingEngines, make_stage, make_tasks

from prime_rl.configs.paths import StagePaths
from prime_rl.control.broadcasts import BroadcastReceiver, BroadcastSender
from prime_rl.errors import ConfigError, RunError
from prime_rl.orchestrator.discovery import publish, read_when_there
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.recorder import Recorder
from prime_rl.orchestrator.runner import LoadedSource
from prime_rl.orchestrator.services import Services, wanted_sources
from prime_rl.orchestrator.standalone import StandaloneEvaluation
from prime_rl.orchestrator.tasks import TaskRow, read_tasks, tasks_file, write_tasks
from prime_rl.orchestrator.watcher import WeightWatcher
from prime_rl.traces import read_episodes, read_metrics

EVAL = {
    "source": [
        {"name": name, "env": {"taskset": {"id": name}}, "group_size": 2} for name in ("a", "b")
    ]
}


def evaluate(folder, stage, step, rewards=(1.0, 0.0)):
    paths = StagePaths(folder)
    recorder = Recorder(paths, save_episodes=True)
    draws = iter(list(rewards) * 1000)
    sources = {
        (split, source.label): LoadedSource(
            source,
            make_tasks(3),
            InstantEnvironment(lambda task, draw: next(draws)),
        )
        for split, source in wanted_sources(stage, evaluate_only=True)
    }
    services = Services(
        engines=RecordingEngines(),  # type: ignore[arg-type]
        router_url="",
        model="tiny",
        sources=sources,
        release_sessions=lambda ids: None,
        check=lambda: None,
        cost=lambda lengths: 0.0,
    )
    try:
        asyncio.run(StandaloneEvaluation(stage, services, recorder, step).run())
    finally:
        recorder.close()
    return read_metrics(paths.metrics / "eval.jsonl"), list(read_episodes(paths.traces))


def test_every_source_gets_its_row_under_the_step(tmp_path):
    rows, episodes = evaluate(tmp_path, make_stage(eval=EVAL), step=7)
    assert [row["step"] for row in rows] == [7, 7]
    found = {key: value for row in rows for key, value in row.items()}
    for name in ("a", "b"):
        assert found[f"eval/{name}/count"] == 6 and found[f"eval/{name}/policy_version"] == 7
    mean = (found["eval/a/reward/mean"] + found["eval/b/reward/mean"]) / 2
    assert mean == pytest.approx(0.5)
    assert len(episodes) == 12 and {episode["split"] for episode in episodes} == {"eval"}


def test_what_an_earlier_attempt_evaluated_is_not_repeated(tmp_path):
    evaluate(tmp_path, make_stage(eval=EVAL), step=0)
    rows, episodes = evaluate(tmp_path, make_stage(eval=EVAL), step=0)
    assert len(rows) == 2 and len(episodes) == 12
    rows, _ = evaluate(tmp_path, make_stage(eval=EVAL), step=5)
    assert [row["step"] for row in rows] == [0, 0, 5, 5]


def test_nothing_to_evaluate_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        evaluate(tmp_path, make_stage(), step=0)


def make_watcher(folder, timeout_s=0.2):
    return WeightWatcher(
        BroadcastReceiver(folder, timeout_s),
        RecordingEngines(),
        Policy(-1, -1),
        pauses_engines=True,
        may_take=lambda: True,
        on_pending=lambda version: None,
        on_published=lambda version: None,
        on_applied=lambda version: None,
    )


def test_a_trainer_that_never_offers_is_an_error(tmp_path):
    with pytest.raises(RunError, match="did not offer version 0 within 0.1 s"):
        asyncio.run(make_watcher(tmp_path).wait_for(0, 0.1))


def test_a_payload_that_never_comes_is_an_error_and_engines_go_on(tmp_path):
    watcher = make_watcher(tmp_path)
    BroadcastSender(tmp_path, 1.0).offer(0)
    with pytest.raises(RunError, match="payload of version 0 did not arrive within 0.2 s"):
        asyncio.run(watcher.take(0))
    assert watcher._engines.events == ["pause", "resume"]


def test_the_newest_offer_is_taken(tmp_path):
    sender = BroadcastSender(tmp_path, 1.0)
    for version in (1, 2):
        sender.offer(version)
        sender.start(version)
        sender.finish(version)
    watcher = make_watcher(tmp_path)
    asyncio.run(watcher.wait_for(1, 1.0))
    assert watcher._policy.version == 2 and watcher._engines.events == [
        "pause",
        "update 2",
        "resume",
    ]


def test_discovery_files_are_read_when_they_are_there(tmp_path):
    path = tmp_path / "runtime" / "engine_0.url"
    with pytest.raises(RunError, match="engine 0 was not ready within 0.1 s"):
        asyncio.run(read_when_there(path, "engine 0", 0.1))
    publish(path, "http://127.0.0.1:1")
    assert asyncio.run(read_when_there(path, "engine 0", 0.1)) == "http://127.0.0.1:1"


def test_tasks_travel_through_a_file(tmp_path):
    path = tasks_file(tmp_path / "envs" / "train" / "words.address")
    tasks = [TaskRow("k", {"answer": "drow", "nested": [1, {"x": None}]}), *make_tasks(2)]
    write_tasks(path, tasks)
    assert path.name == "words.tasks" and read_tasks(path) == tasks
