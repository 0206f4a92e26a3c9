"""Listeners hear of episodes, steps and weight updates from the orchestrator."""

from __future__ import annotations

from prime_rl.api import hookimpl
from prime_rl.configs.paths import StagePaths
from prime_rl.orchestrator.episode import EpisodeRequest, failed_result
from prime_rl.orchestrator.recorder import Recorder
from prime_rl.orchestrator.sink import Batch, Observed
from prime_rl.plugins import PluginRecord
from prime_rl.plugins.hooks import Hooks


class Listener:
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.heard: list[tuple] = []

    @hookimpl
    def trace_event(self, event, episode_id, fields):
        self.heard.append((event, episode_id, fields["outcome"], fields["group"]))

    @hookimpl
    def step_metrics(self, step, metrics, role):
        self.heard.append((role, step, metrics["x"]))

    @hookimpl
    def weight_update(self, version, seconds, role):
        self.heard.append((role, version, seconds))


def test_listeners_are_told(tmp_path):
    hooks, listener = Hooks(), Listener()
    record = PluginRecord("hook", "ear", "ear:Ear", "ear", "1", "", "", "ok", "")
    assert hooks.add(record, listener)
    recorder = Recorder(StagePaths(tmp_path), save_episodes=True, hooks=hooks)
    request = EpisodeRequest(
        split="train", source="s", task_index=0, group_id=4, member=1, version=0, step=1
    )
    result = failed_result(request, "timeout", "too slow")
    recorder.episode(result, "key")
    recorder.step(1, Batch([], Observed()), {"x": 2.0})
    recorder.weights_taken(3, 0.5)
    recorder.close()
    assert listener.heard == [
        ("episode", result.id, "timeout", 4),
        ("orchestrator", 1, 2.0),
        ("engine", 3, 0.5),
    ]
    assert hooks.dropped == []
