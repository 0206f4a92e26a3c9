"""The whole orchestrator against environments, engines and a trainer that take no time.

Groups of 16 single-turn episodes of 512 tokens (128 of prompt) go through everything that really
happens to them: dispatch, branches, score, filter, queue, packing, metrics; without and with the trace
stream. A quarter of the groups has equal rewards and is filtered out. Wanted: 2,000 episodes per second.

At full speed all 256 episodes in flight end at the same moment, and the event loop is late by what all
of them cost together. The last row lets them end one by one, 500 per second, as engines do.

Run: python tests/benchmarks/bench_orchestrator.py [--steps 20] [--profile]
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import os
import pstats
import random
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prime_rl.algorithms.grpo import GRPO, GRPOConfig
from prime_rl.configs.base import PluginConfig, ValidationContext
from prime_rl.configs.paths import StagePaths
from prime_rl.configs.run import RLConfig
from prime_rl.control.broadcasts import BroadcastSender
from prime_rl.orchestrator.lag import EventLoopLag
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.recorder import Recorder
from prime_rl.orchestrator.runner import LoadedSource
from prime_rl.orchestrator.services import Services
from prime_rl.orchestrator.tasks import TaskRow
from prime_rl.wire import RankBatch

EPISODES_PER_S = 2000.0
PACED_PER_S = 500.0
GROUP, BATCH, INFLIGHT, PROMPT, COMPLETION, TASKS = 16, 1024, 256, 128, 384, 1000


class InstantCall:
    """An episode that is there at once."""

    def __init__(self, record: dict[str, Any], trace_id: str, duration_s: float) -> None:
        self.trace_ids = [trace_id]
        self._record = record
        self._duration_s = duration_s

    async def result(self) -> dict[str, Any]:
        """The record."""
        if self._duration_s:
            await asyncio.sleep(self._duration_s)
        return self._record


class InstantEnvironment:
    """Implements Environment: prompt and completion are one of a few, the reward is random. With a
    rate, episodes take random times such that about so many end per second."""

    def __init__(self, rate: float) -> None:
        draw = random.Random(0)
        self._longest_s = 2 * INFLIGHT / rate if rate else 0.0
        self._draw = draw
        self._nodes = [self._two_nodes(draw) for _ in range(64)]
        self._number = 0

    @staticmethod
    def _two_nodes(draw: random.Random) -> list[dict[str, Any]]:
        logprobs = [-draw.random() for _ in range(COMPLETION)]
        return [
            {
                "parent": None,
                "sampled": False,
                "message": {"role": "user", "content": "question " * 20},
                "token_ids": [draw.randrange(150_000) for _ in range(PROMPT)],
                "mask": [False] * PROMPT,
                "logprobs": [],
            },
            {
                "parent": 0,
                "sampled": True,
                "message": {"role": "assistant", "content": "answer " * 60},
                "token_ids": [draw.randrange(150_000) for _ in range(COMPLETION)],
                "mask": [True] * COMPLETION,
                "logprobs": logprobs,
            },
        ]

    def start(
        self, task: Mapping[str, Any], model: str, sampling: Mapping[str, Any]
    ) -> InstantCall:
        """See Environment.start."""
        self._number += 1
        reward = 1.0 if task["number"] % 4 == 0 else float(self._draw.random() < 0.5)
        trace = {
            "id": f"trace-{self._number}",
            "ok": True,
            "is_timeout": False,
            "agent": {"name": "agent", "trainable": True},
            "rewards": {"accuracy": {"score": reward, "weight": 1.0}},
            "metrics": {"exact": reward},
            "info": {},
            "stop_condition": "agent_completed",
            "errors": [],
            "calls": [{"finish_reason": "stop", "usage": {"prompt_tokens": PROMPT}, "error": None}],
            "nodes": self._nodes[self._number % len(self._nodes)],
        }
        record = {
            "id": f"episode-{self._number}",
            "ok": True,
            "is_timeout": False,
            "errors": [],
            "traces": [trace],
        }
        return InstantCall(record, trace["id"], self._draw.random() * self._longest_s)

    async def close(self) -> None:
        """Nothing is open."""


class InstantEngines:
    """Implements EngineControl."""

    async def pause(self) -> None:
        """At once."""

    async def update(self, version: int, directory: Path) -> None:
        """At once."""

    async def resume(self) -> None:
        """At once."""

    async def metrics(self) -> None:
        """None: the number of episodes in flight stays fixed."""


class InstantTrainer:
    """Takes batches and publishes the version of each at once."""

    def __init__(self, paths: StagePaths, steps: int) -> None:
        self._sender = BroadcastSender(paths.broadcasts, 60.0)
        self._shipped = [threading.Event() for _ in range(steps + 1)]
        self._shipped[0].set()
        self.rows = 0
        self._thread = threading.Thread(target=self._publish, daemon=True)
        self._thread.start()

    def _publish(self) -> None:
        for version, shipped in enumerate(self._shipped):
            shipped.wait()
            self._sender.offer(version)
            self._sender.wait_ready(version)
            self._sender.start(version)
            self._sender.finish(version)

    async def send(self, step: int, grid: Sequence[RankBatch]) -> None:
        """See BatchServer.send."""
        self.rows += sum(len(rank.micro_batches) for rank in grid)
        self._shipped[step].set()


def stage_config(steps: int) -> RLConfig:
    """A run of `steps` batches."""
    env = {"taskset": {"id": "instant"}}
    values = {
        "type": "rl",
        "max_steps": steps,
        "seq_len": 8192,
        "log": {"interval_s": 3600.0},
        "orchestrator": {
            "batch_size": BATCH,
            "train": {"source": [{"name": "instant", "env": env, "group_size": GROUP}]},
            "concurrency": {"max_inflight": INFLIGHT, "ramp_window_s": 0.0},
        },
    }

    def config_class(kind: str, name: str) -> type[PluginConfig]:
        return GRPOConfig if kind == "algorithm" else PluginConfig

    return RLConfig.model_validate(values, context=ValidationContext(config_class))


async def run(
    folder: Path, steps: int, saves: bool, rate: float
) -> tuple[Orchestrator, list[float]]:
    """The orchestrator after its run, and the event loop's lags in seconds."""
    stage, paths = stage_config(steps), StagePaths(folder)
    [source] = stage.orchestrator.train.source
    tasks = [TaskRow(f"task-{number}", {"number": number}) for number in range(TASKS)]
    services = Services(
        engines=InstantEngines(),  # type: ignore[arg-type]
        router_url="",
        model="instant",
        sources={("train", source.label): LoadedSource(source, tasks, InstantEnvironment(rate))},
        release_sessions=lambda ids: None,
        check=lambda: None,
        cost=lambda lengths: sum(1.2e9 * n + 2 * 28 * 2048 * n * n for n in lengths),
    )
    recorder = Recorder(paths, saves)
    orchestrator = Orchestrator(
        stage=stage,
        paths=paths,
        services=services,
        batches=InstantTrainer(paths, steps),  # type: ignore[arg-type]
        recorder=recorder,
        algorithms={source.label: GRPO(stage.orchestrator.train.algo)},
        pauses_engines=False,
    )
    lag = EventLoopLag()
    measuring = asyncio.create_task(lag.run())
    try:
        await orchestrator.run()
    finally:
        measuring.cancel()
        recorder.close()
    return orchestrator, sorted(lag.lags_s)


def measure(steps: int, saves: bool, rate: float = 0.0) -> float:
    """Print a row; episodes per second."""
    with tempfile.TemporaryDirectory() as folder:
        started, cpu = time.perf_counter(), time.process_time()
        orchestrator, lags_s = asyncio.run(run(Path(folder), steps, saves, rate))
        wall_s, cpu_s = time.perf_counter() - started, time.process_time() - cpu
    episodes = orchestrator.dispatcher.completed
    p50, p99 = (lags_s[int(share * (len(lags_s) - 1))] * 1e3 for share in (0.5, 0.99))
    print(
        f"{'with' if saves else 'without'} traces: {episodes / wall_s:,.0f} episodes/s, "
        f"{orchestrator.progress.total_samples / wall_s:,.0f} samples/s shipped, "
        f"{cpu_s / episodes * 1e6:.0f} us of processor time per episode "
        f"(one core to itself: {episodes / cpu_s:,.0f}/s); event-loop lag p50 {p50:.1f} ms, "
        f"p99 {p99:.1f} ms, max {lags_s[-1] * 1e3:.1f} ms",
        flush=True,
    )
    return episodes / wall_s


def main() -> int:
    """1 when the wanted figure is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--traces", action="store_true", help="profile with the trace stream")
    arguments = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"load {load:.1f}; {arguments.steps} batches of {BATCH} episodes in groups of {GROUP}")
    if arguments.profile:
        profile = cProfile.Profile(time.process_time)
        profile.runcall(measure, arguments.steps, arguments.traces)
        pstats.Stats(profile).sort_stats("tottime").print_stats(30)
        return 0
    rate = measure(arguments.steps, False)
    measure(arguments.steps, True)
    measure(max(2, arguments.steps // 4), True, PACED_PER_S)
    return int(rate < EPISODES_PER_S)


if __name__ == "__main__":
    raise SystemExit(main())
