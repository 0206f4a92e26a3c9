"""Evaluates one set of weights once: what a fine-tuning stage does before and after."""

from __future__ import annotations

import asyncio
import contextlib

from prime_rl.configs.orchestrator import ConcurrencyConfig
from prime_rl.configs.run import RLConfig, SFTConfig
from prime_rl.errors import ConfigError
from prime_rl.orchestrator.dispatch import Dispatcher, GroupCancellation
from prime_rl.orchestrator.episode import EpisodeResult
from prime_rl.orchestrator.loop import make_eval_sink
from prime_rl.orchestrator.policy import Policy, Progress
from prime_rl.orchestrator.recorder import Recorder
from prime_rl.orchestrator.runner import ServedEpisodeRunner
from prime_rl.orchestrator.services import Services
from prime_rl.orchestrator.source import Draw

EPISODE_TIMEOUT_S = 600.0
CHECK_S = 1.0


class StandaloneEvaluation:
    """Runs every evaluation source on the engines as they are; rows carry `step`."""

    def __init__(
        self, stage: RLConfig | SFTConfig, services: Services, recorder: Recorder, step: int
    ) -> None:
        concurrency = ConcurrencyConfig()
        timeout_s = EPISODE_TIMEOUT_S
        if isinstance(stage, RLConfig):
            concurrency = stage.orchestrator.concurrency
            timeout_s = stage.orchestrator.episode_timeout_s
        policy = Policy(version=step, published=step, model=services.model)
        self._services = services
        self._recorder = recorder
        self._step = step
        self._changed = asyncio.Event()
        self._sink = make_eval_sink(services, recorder)
        self._dispatcher = Dispatcher(
            runner=ServedEpisodeRunner(
                services.sources, policy, services.release_sessions, stage.seq_len, timeout_s
            ),
            sink=self,
            policy=policy,
            progress=Progress(),
            draw=_no_training,
            wants_more=lambda committed: False,
            group_sizes={},
            max_inflight=concurrency.fixed_inflight,
            max_off_policy_steps=0,
        )
        self._dispatcher.stop_training("finished")

    def finished(self, result: EpisodeResult) -> None:
        """See Sink.finished."""
        source = self._services.sources["eval", result.request.source]
        self._recorder.episode(result, source.tasks[result.request.task_index].key)
        self._sink.finished(result)
        self._changed.set()

    def cancelled(self, cancellation: GroupCancellation) -> None:
        """See Sink.cancelled."""
        self._sink.cancelled(cancellation)
        self._changed.set()

    async def run(self) -> None:
        """Returns when every source has its row. Raises ConfigError when there is no source."""
        if not self._services.sources:
            raise ConfigError("there is nothing to evaluate: the stage has no eval section")
        done = self._recorder.evaluated(self._step)
        try:
            self._dispatcher.enqueue_eval(self._sink.start(self._step, self._step, skip=done))
            while not self._sink.is_idle:
                if self._dispatcher.failure is not None:
                    raise self._dispatcher.failure
                self._services.check()
                self._changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), CHECK_S)
        finally:
            await self._dispatcher.stop()


def _no_training() -> Draw:
    raise AssertionError("an evaluation draws no training task")
