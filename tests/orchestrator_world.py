"""A world around the orchestrator's loop for tests: instant environments, engines, a trainer."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prime_rl.algorithms.grpo import GRPO, GRPOConfig
from prime_rl.api.algorithm import Algorithm
from prime_rl.batches import BatchClosed, open_batch_client, open_batch_server
from prime_rl.configs.base import PluginConfig, ValidationContext
from prime_rl.configs.paths import StagePaths
from prime_rl.configs.run import RLConfig
from prime_rl.control.broadcasts import BroadcastSender, HandshakeTimeout, prune_beyond
from prime_rl.errors import PrimeError
from prime_rl.orchestrator.env_client import EpisodeRefused
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.recorder import Recorder
from prime_rl.orchestrator.reference import References
from prime_rl.orchestrator.runner import LoadedSource
from prime_rl.orchestrator.services import Services, wanted_sources
from prime_rl.orchestrator.state import OrchestratorState
from prime_rl.orchestrator.tasks import TaskRow
from prime_rl.wire import RankBatch


def config_class(kind: str, name: str) -> type[PluginConfig]:
    """Settings of any plugin: grpo's own, nothing for the rest."""
    return GRPOConfig if kind == "algorithm" else PluginConfig


def make_stage(**orchestrator: Any) -> RLConfig:
    """A small RL stage; keywords go to the orchestrator section, `max_steps` and friends above it."""
    above = {
        name: orchestrator.pop(name)
        for name in ("max_steps", "ckpt", "seed", "seq_len", "trainer", "resume")
        if name in orchestrator
    }
    section = {
        "batch_size": 8,
        "train": {"source": [{"name": "words", "env": {"taskset": {"id": "x"}}, "group_size": 4}]},
        "concurrency": {"max_inflight": 16},
        **orchestrator,
    }
    values = {
        "type": "rl",
        "max_steps": 4,
        "weight_broadcast_timeout_s": 20.0,
        "log": {"interval_s": 60.0},
        **above,
        "orchestrator": section,
    }
    return RLConfig.model_validate(values, context=ValidationContext(config_class))


def make_record(trace_id: str, reward: float, tokens: list[int], **changes: Any) -> dict[str, Any]:
    """An episode record as the env server's wire carries it: a prompt of two tokens, one reply."""
    trace = {
        "id": trace_id,
        "ok": True,
        "is_timeout": False,
        "agent": {"name": "agent", "trainable": True},
        "rewards": {"accuracy": {"score": reward, "weight": 1.0}},
        "metrics": {"exact": float(reward == 1.0)},
        "info": {},
        "stop_condition": "agent_completed",
        "errors": [],
        "calls": [{"finish_reason": "stop", "usage": {"prompt_tokens": 3}, "error": None}],
        "nodes": [
            {
                "parent": None,
                "sampled": False,
                "message": {"role": "user", "content": "word"},
                "token_ids": [1, 2],
                "mask": [False, False],
                "logprobs": [],
            },
            {
                "parent": 0,
                "sampled": True,
                "message": {"role": "assistant", "content": "drow"},
                "token_ids": [3, *tokens],
                "mask": [False] + [True] * len(tokens),
                "logprobs": [-0.123456789] * len(tokens),
            },
        ],
    }
    trace |= changes.pop("trace", {})
    return {
        "id": f"e-{trace_id}",
        "ok": True,
        "is_timeout": False,
        "errors": [],
        "traces": [trace],
    } | changes


Reply = Callable[[Mapping[str, Any], random.Random], float | str]
"""(task, randomness) -> the reward, or "error", "refused", "hang", "truncated", "empty"."""


def spread_rewards(task: Mapping[str, Any], draw: random.Random) -> float | str:
    """A reward that differs between nearly all episodes."""
    return draw.random()


class InstantCall:
    """An episode that takes up to `delay_s`."""

    def __init__(self, environment: InstantEnvironment, task: Mapping[str, Any]) -> None:
        self._environment = environment
        self._task = task
        self.trace_ids = [f"trace-{next(environment.numbers)}"]
        environment.opened += self.trace_ids

    async def result(self) -> dict[str, Any]:
        environment = self._environment
        await asyncio.sleep(environment.draw.random() * environment.delay_s)
        answer = environment.reply(self._task, environment.draw)
        [trace_id] = self.trace_ids
        if answer == "refused":
            raise EpisodeRefused("no such method")
        if answer == "hang":
            await asyncio.sleep(3600)
        if answer == "error":
            error = {"type": "ProviderError", "message": "overloaded"}
            changes = {"ok": False, "errors": [error], "nodes": [], "rewards": {}}
            return make_record(trace_id, 0.0, [4], ok=False, trace=changes)
        if answer == "empty":
            return make_record(trace_id, 0.0, [])
        if answer == "truncated":
            calls = [{"finish_reason": "length", "usage": {}, "error": None}]
            return make_record(trace_id, 0.0, [4, 5, 6], trace={"calls": calls})
        return make_record(trace_id, float(answer), [10 + self._task["number"], 5])


class InstantEnvironment:
    """Implements Environment."""

    def __init__(
        self, reply: Reply = spread_rewards, delay_s: float = 0.002, seed: int = 0
    ) -> None:
        self.reply = reply
        self.delay_s = delay_s
        self.draw = random.Random(seed)
        self.numbers = itertools.count()
        self.opened: list[str] = []
        self.samplings: list[Mapping[str, Any]] = []
        self.tasks: list[int] = []

    def start(
        self, task: Mapping[str, Any], model: str, sampling: Mapping[str, Any]
    ) -> InstantCall:
        self.samplings.append(sampling)
        self.tasks.append(task["number"])
        return InstantCall(self, task)

    async def close(self) -> None:
        pass


class RecordingEngines:
    """Implements EngineControl; remembers the order of events."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.pages: list[str] | None = None
        """What /metrics says; None: nothing."""

    async def pause(self) -> None:
        self.events.append("pause")

    async def update(self, version: int, directory: Path) -> None:
        assert (directory / ".finished").exists()
        self.events.append(f"update {version}")

    async def resume(self) -> None:
        self.events.append("resume")

    async def metrics(self) -> list[str] | None:
        return self.pages


@dataclass
class Trainer:
    """Publishes the start version, then takes a batch and publishes a version, step after step."""

    paths: StagePaths
    first_step: int
    max_steps: int
    ranks: int = 1
    step_s: float = 0.0
    events: list[str] = field(default_factory=list)
    batches: dict[int, list[RankBatch]] = field(default_factory=dict)
    closed: str = ""
    is_stopped: threading.Event = field(default_factory=threading.Event)

    def start(self) -> threading.Thread:
        """Run in a thread, as the real one runs in a process."""
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        sender = BroadcastSender(self.paths.broadcasts, 0.2)
        clients = [open_batch_client("zmq", self.paths, rank) for rank in range(self.ranks)]
        try:
            self._publish(sender, self.first_step - 1)
            for step in range(self.first_step, self.max_steps + 1):
                self.batches[step] = [client.receive(step, 20.0) for client in clients]
                threading.Event().wait(self.step_s)
                self._publish(sender, step)
        except BatchClosed as closed:
            self.closed = str(closed)
        except HandshakeTimeout:
            self.closed = self.closed or "stopped"
        finally:
            for client in clients:
                client.close()

    def _publish(self, sender: BroadcastSender, version: int) -> None:
        sender.offer(version)
        while True:
            try:
                sender.wait_ready(version)
                break
            except HandshakeTimeout:
                if self.is_stopped.is_set():
                    raise
        self.events.append(f"transfer {version}")
        sender.start(version)
        sender.finish(version)


@dataclass
class World:
    """One run of the loop and everything it touched."""

    orchestrator: Orchestrator
    trainer: Trainer
    engines: RecordingEngines
    environments: dict[tuple[str, str], InstantEnvironment]
    released: list[str]
    paths: StagePaths

    def trained_tasks(self) -> dict[int, list[int]]:
        """Step -> task number of every document, in the order of the rows."""
        found: dict[int, list[int]] = {}
        for step, ranks in self.trainer.batches.items():
            numbers = []
            for batch in ranks:
                for row in batch.micro_batches:
                    ids = memoryview(row.input_ids).cast("i").tolist()
                    start = 0
                    for length, name in zip(row.lengths, row.trace_ids, strict=True):
                        if name:
                            numbers.append(ids[start + 3] - 10)
                        start += length
            found[step] = sorted(numbers)
        return found


def make_tasks(count: int) -> list[TaskRow]:
    """Numbered tasks."""
    return [TaskRow(f"task-{number}", {"number": number}) for number in range(count)]


def run_world(
    folder: Path,
    stage: RLConfig,
    *,
    replies: Mapping[tuple[str, str], Reply] | None = None,
    tasks: int = 50,
    delay_s: float = 0.002,
    seed: int = 0,
    pauses_engines: bool = True,
    resumed_after: int = 0,
    state: OrchestratorState | None = None,
    during: Callable[[Orchestrator], Any] | None = None,
    step_s: float = 0.0,
    pages: list[str] | None = None,
    algorithms: Mapping[str, Algorithm] | None = None,
    references: References | None = None,
    frozen_model: str | None = None,
) -> World:
    """Run the loop to its end (or its exception, raised here with `world` as an attribute)."""
    return asyncio.run(
        _run_world(
            folder,
            stage,
            replies or {},
            tasks,
            delay_s,
            seed,
            pauses_engines,
            resumed_after,
            state,
            during,
            step_s,
            pages,
            algorithms,
            references,
            frozen_model,
        )
    )


async def _run_world(
    folder: Path,
    stage: RLConfig,
    replies: Mapping[tuple[str, str], Reply],
    tasks: int,
    delay_s: float,
    seed: int,
    pauses_engines: bool,
    resumed_after: int,
    state: OrchestratorState | None,
    during: Callable[[Orchestrator], Any] | None,
    step_s: float,
    pages: list[str] | None,
    algorithms: Mapping[str, Algorithm] | None,
    references: References | None,
    frozen_model: str | None,
) -> World:
    paths = StagePaths(folder)
    ranks = stage.trainer.parallel.ranks
    batches = open_batch_server("zmq", paths, ranks)
    recorder = Recorder(paths, stage.orchestrator.save_episodes)
    engines = RecordingEngines()
    engines.pages = pages
    released: list[str] = []
    environments: dict[tuple[str, str], InstantEnvironment] = {}
    sources = {}
    for split, source in wanted_sources(stage, False):
        environment = InstantEnvironment(
            replies.get((split, source.label), spread_rewards), delay_s, seed
        )
        environments[split, source.label] = environment
        sources[split, source.label] = LoadedSource(
            source, make_tasks(tasks), environment, frozen_model if split == "train" else None
        )
    services = Services(
        engines=engines,  # type: ignore[arg-type]
        router_url="",
        model="tiny",
        sources=sources,
        release_sessions=released.extend,
        check=lambda: None,
        cost=lambda lengths: float(sum(lengths)),
    )
    prune_beyond(paths.broadcasts, resumed_after - 1)
    try:
        orchestrator = Orchestrator(
            stage=stage,
            paths=paths,
            services=services,
            batches=batches,
            recorder=recorder,
            algorithms=dict(algorithms or {})
            or {
                source.label: GRPO(source.algo or stage.orchestrator.train.algo)
                for source in stage.orchestrator.train.source
            },
            references=references,
            pauses_engines=pauses_engines,
            resumed_after=resumed_after,
            state=state,
        )
    except PrimeError:
        batches.close()
        recorder.close()
        raise
    trainer = Trainer(
        paths, resumed_after + 1, stage.max_steps, ranks, step_s, events=engines.events
    )
    world = World(orchestrator, trainer, engines, environments, released, paths)
    thread = trainer.start()
    helper = asyncio.create_task(during(orchestrator)) if during else None
    reason = ""
    try:
        await orchestrator.run()
    except Exception as error:
        reason = str(error)
        error.world = world  # type: ignore[attr-defined]
        raise
    finally:
        if helper is not None:
            helper.cancel()
        await asyncio.to_thread(batches.close, reason)
        recorder.close()
        trainer.is_stopped.set()
        await asyncio.to_thread(thread.join, 10)
    return world
