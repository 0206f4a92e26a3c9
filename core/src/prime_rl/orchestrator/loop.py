"""The orchestrator's loop: wait for a batch, pack, send, record, save, go on."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prime_rl.api.algorithm import Algorithm
from prime_rl.batches import BatchServer
from prime_rl.configs.paths import StagePaths
from prime_rl.configs.run import RLConfig
from prime_rl.control.broadcasts import BroadcastReceiver
from prime_rl.control.checkpoints import ComponentCheckpoint, is_due
from prime_rl.errors import CheckpointError, RunError, what_was_raised
from prime_rl.orchestrator import evaluate
from prime_rl.orchestrator.admission import Admission
from prime_rl.orchestrator.concurrency_watcher import ConcurrencyWatcher
from prime_rl.orchestrator.curriculum import make_sampler
from prime_rl.orchestrator.dispatch import Dispatcher, GroupCancellation
from prime_rl.orchestrator.episode import EpisodeResult
from prime_rl.orchestrator.evaluate import EvalSink
from prime_rl.orchestrator.group import ScoredEpisode, ScoredGroup, score
from prime_rl.orchestrator.lag import EventLoopLag
from prime_rl.orchestrator.metrics import (
    batch_metrics,
    no_signal_reason,
    warn_of_errors,
    warn_of_no_signal,
)
from prime_rl.orchestrator.needs import EpisodeNeeds
from prime_rl.orchestrator.pack import pack
from prime_rl.orchestrator.policy import Policy, Progress, fillable_batches, gate_is_open
from prime_rl.orchestrator.recorder import Recorder
from prime_rl.orchestrator.reference import References
from prime_rl.orchestrator.runner import ServedEpisodeRunner
from prime_rl.orchestrator.services import Services
from prime_rl.orchestrator.sink import Batch, TrainSink
from prime_rl.orchestrator.source import SourceShare, TrainSource
from prime_rl.orchestrator.state import OrchestratorState, decode_leftover, encode_leftover
from prime_rl.orchestrator.tasks import TaskRow
from prime_rl.orchestrator.watcher import WeightWatcher
from prime_rl.wire import BatchHeader, RankBatch

log = logging.getLogger(__name__)

CHECK_S = 1.0
"""Longest time between two looks at whether everything still runs."""


class Orchestrator:
    """One RL stage, from its start (or the step after a checkpoint) to its last version."""

    def __init__(
        self,
        *,
        stage: RLConfig,
        paths: StagePaths,
        services: Services,
        batches: BatchServer,
        recorder: Recorder,
        algorithms: dict[str, Algorithm],
        pauses_engines: bool,
        references: References | None = None,
        resumed_after: int = 0,
        state: OrchestratorState | None = None,
    ) -> None:
        config = stage.orchestrator
        self._stage = stage
        self._services = services
        self._batches = batches
        self._recorder = recorder
        self._algorithms = algorithms
        self._references = references
        self._awaiting_references = 0
        """Episodes taken for the step being filled that are not packed yet."""
        self._resumed_after = resumed_after
        self._checkpoints = ComponentCheckpoint(paths)
        self._changed = asyncio.Event()
        self._warned_rounds = 0
        self.progress = Progress(step=resumed_after + 1)
        self.policy = Policy(resumed_after - 1, resumed_after - 1, services.model)
        sizes = {source.label: source.group_size for source in config.train.source}
        self._gates = {source.label: source.gates for source in config.train.source}
        self.source = make_train_source(stage, services)
        never_stale = [label for (_, label), s in services.sources.items() if s.is_frozen]
        self.train_sink = TrainSink(
            score=self._score,
            close=self.source.close,
            reopen=self.source.reopen,
            group_sizes=sizes,
            progress=self.progress,
            batch_size=config.batch_size,
            constant=config.constant_batch_size,
            max_off_policy_steps=config.max_off_policy_steps,
            changed=self._changed.set,
            never_stale=never_stale,
        )
        self.eval_sink = make_eval_sink(services, recorder)
        self.dispatcher = Dispatcher(
            runner=ServedEpisodeRunner(
                services.sources,
                self.policy,
                services.release_sessions,
                stage.seq_len,
                config.episode_timeout_s,
                episode_needs(stage, services, algorithms),
            ),
            sink=self,
            policy=self.policy,
            progress=self.progress,
            draw=self.source.draw,
            wants_more=self._wants_more,
            group_sizes=sizes,
            never_stale=never_stale,
            max_inflight=config.concurrency.fixed_inflight,
            max_off_policy_steps=config.max_off_policy_steps,
            admission=make_admission(stage),
        )
        self._lag = EventLoopLag()
        self._concurrency = ConcurrencyWatcher(
            services.engines,
            self.dispatcher,
            config.concurrency,
            largest_group=max(sizes.values()),
            seq_len=stage.seq_len,
        )
        self._background: list[asyncio.Task[None]] = []
        self._watcher = WeightWatcher(
            BroadcastReceiver(paths.broadcasts, stage.weight_broadcast_timeout_s),
            services.engines,
            self.policy,
            pauses_engines=pauses_engines,
            may_take=lambda: not self.eval_sink.holds_weights,
            on_pending=self.dispatcher.cancel_stale,
            on_published=lambda _: self._changed.set(),
            on_applied=self._version_applied,
        )
        if state is not None:
            self._restore(state)

    # What episodes become

    def finished(self, result: EpisodeResult) -> None:
        """See Sink.finished."""
        self._recorder.episode(result, self._task_key(result))
        if result.request.split == "eval":
            self.eval_sink.finished(result)
            self._changed.set()
        else:
            self.train_sink.finished(result)

    def cancelled(self, cancellation: GroupCancellation) -> None:
        """See Sink.cancelled."""
        if cancellation.split == "eval":
            self.eval_sink.cancelled(cancellation)
            self._changed.set()
        else:
            self.train_sink.cancelled(cancellation)

    def _task_key(self, result: EpisodeResult) -> str:
        return self._task(result).key

    def _task(self, result: EpisodeResult) -> TaskRow:
        request = result.request
        return self._services.sources[request.split, request.source].tasks[request.task_index]

    def _score(self, results: Sequence[EpisodeResult]) -> ScoredGroup:
        request = results[0].request
        rewards = [result.reward for result in results if not result.failed]
        self.source.samplers[request.source].observe(request.task_index, rewards)
        algorithm, gates = self._algorithms[request.source], self._gates[request.source]
        task = self._task(results[0])
        view = self._services.view
        return score(algorithm, results, task.key, gates, task=task.data, view=view)

    def _wants_more(self, committed: int) -> bool:
        """Whether queue and flight hold fewer episodes than the batches that may be filled need.

        Those in flight count by the share that usually carries signal, so that backfill does not
        wait for the last of them; in synchronous training they count fully, or the surplus would
        ship one version late.
        """
        config = self._stage.orchestrator
        batches = fillable_batches(
            self.progress.step, self.policy.version, config.target_lag, self._stage.max_steps
        )
        share = self.train_sink.live_share if config.target_lag else 1.0
        ready = self.train_sink.available + self._awaiting_references
        expected = ready + share * committed
        return expected < batches * config.batch_size

    # The loop

    async def run(self) -> None:
        """Until the last version runs on the engines and is evaluated. Raises RunError."""
        max_steps = self._stage.max_steps
        await self._watcher.wait_for(self._resumed_after, self._stage.weight_broadcast_timeout_s)
        log.info("engines run version %d", self.policy.version)
        await self._concurrency.begin()
        parts = (self._watcher.run(), self._report(), self._concurrency.run(), self._lag.run())
        self._background = [asyncio.create_task(part) for part in parts]
        try:
            while self.progress.step <= max_steps:
                await self._step()
            self.dispatcher.stop_training("finished")
            await self._wait(lambda: self.policy.version >= max_steps)
            await self._wait(lambda: self.eval_sink.is_idle)
        finally:
            for task in self._background:
                task.cancel()
            await self.dispatcher.stop()
            await asyncio.gather(*self._background, return_exceptions=True)

    async def _step(self) -> None:
        """Fill, ship and record the batch of one step."""
        started = time.monotonic()
        step = self.progress.step
        await self._wait(lambda: self.train_sink.is_ready)
        ready = time.monotonic()
        await self._wait(lambda: self.train_sink.is_ready and self._gate_is_open())
        opened = time.monotonic()
        batch = await self._take()
        scored = time.monotonic()
        warn_of_no_signal(step, batch.observed)
        warn_of_errors(step, batch.observed)
        if not batch.episodes:
            log.warning("step %d: none of the episodes carries a signal; nothing is sent", step)
            return
        self._count(batch)
        state = self._snapshot(step)
        # From here on episodes are for the next batch: the gate must see that at once.
        self.progress.step += 1
        self.train_sink.sweep()
        self.dispatcher.pump()
        grid = await asyncio.to_thread(self._pack, batch, step)
        packed = time.monotonic()
        await self._batches.send(step, grid)
        saved_s = await self._save(step, state)
        seconds = time.monotonic() - started
        output_tokens = sum(episode.output_tokens for episode in batch.observed.episodes)
        self._recorder.step(
            step,
            batch,
            {
                **batch_metrics(batch, step),
                **self._standing(),
                "time/step": seconds,
                "time/wait_for_batch": ready - started,
                "time/wait_for_policy": opened - ready,
                "time/score_references": scored - opened,
                "time/pack": packed - scored,
                "time/save_ckpt": saved_s,
                "perf/throughput": output_tokens / seconds,
            },
        )

    async def _take(self) -> Batch:
        """The step's batch, with a reference's log-probabilities where they are needed. Episodes that
        could not be scored are replaced; with a batch size that varies they are left out."""
        batch = self.train_sink.take()
        if self._references is None:
            return batch
        found: list[ScoredEpisode] = []
        waiting = batch.episodes
        while waiting:
            self._awaiting_references = len(found) + len(waiting)
            scored, failed = await self._score_references(self._references, waiting)
            found += scored
            waiting = ()
            if failed and self._stage.orchestrator.constant_batch_size:
                missing = self._awaiting_references - len(found)
                self._awaiting_references = len(found)
                await self._wait(functools.partial(self.train_sink.has, missing))
                waiting = self.train_sink.take_episodes(missing)
        self._awaiting_references = 0
        return Batch(found, batch.observed)

    async def _score_references(
        self, references: References, episodes: Sequence[ScoredEpisode]
    ) -> tuple[list[ScoredEpisode], list[ScoredEpisode]]:
        """See References.score; what breaks anywhere meanwhile is raised."""
        scoring = asyncio.create_task(references.score(episodes))
        scoring.add_done_callback(lambda _: self._changed.set())
        try:
            await self._wait(scoring.done)
        finally:
            scoring.cancel()
        scored, failed = scoring.result()
        for episode in failed:
            wasted = self.train_sink.observed.wasted_tokens
            wasted["reference"] += episode.figures.output_tokens
        return scored, failed

    def _pack(self, batch: Batch, step: int) -> list[RankBatch]:
        samples = [sample for episode in batch.episodes for sample in episode.samples]
        ranks = self._stage.trainer.parallel.ranks
        grid = pack(samples, self._stage.seq_len, ranks, self._services.cost)
        header = BatchHeader(step, self.policy.published, step == self._stage.max_steps)
        return [RankBatch(header, micro_batches) for micro_batches in grid]

    def _count(self, batch: Batch) -> None:
        samples = [sample for episode in batch.episodes for sample in episode.samples]
        self.progress.total_episodes += len(batch.episodes)
        self.progress.total_samples += len(samples)
        self.progress.total_tokens += sum(sample.length for sample in samples)

    def _standing(self) -> dict[str, float]:
        """Where the run stands."""
        updates, self._watcher.update_times_s[:] = sum(self._watcher.update_times_s), []
        found: dict[str, float] = {
            "progress/step": self.progress.step - 1,
            "progress/total_tokens": self.progress.total_tokens,
            "progress/total_samples": self.progress.total_samples,
            "progress/total_episodes": self.progress.total_episodes,
            "policy/version": self.policy.version,
            "dispatcher/inflight": self.dispatcher.inflight,
            "watcher/update_s": updates,
            **self._concurrency.metrics(),
            **self._lag.take(),
        }
        for label, sampler in self.source.samplers.items():
            found |= {f"curriculum/{label}/{name}": n for name, n in sampler.metrics().items()}
        for name, ages in (
            ("in_flight", self.dispatcher.inflight_staleness()),
            ("in_queue", self.train_sink.queued_staleness()),
        ):
            if ages:
                found[f"off_policy/{name}/mean"] = sum(ages) / len(ages)
                found[f"off_policy/{name}/max"] = max(ages)
        return found

    def _gate_is_open(self) -> bool:
        lag = self._stage.orchestrator.target_lag
        return gate_is_open(self.progress.step, self.policy.published, lag)

    async def _wait(self, holds: Callable[[], bool]) -> None:
        """Until the condition holds; what may run is started meanwhile. Raises what broke anywhere
        in the orchestrator."""
        while True:
            self._check()
            self.dispatcher.pump()
            if holds():
                return
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), CHECK_S)

    def _check(self) -> None:
        if self.dispatcher.failure is not None:
            raise self.dispatcher.failure
        for task in self._background:
            if task.done():
                task.result()
        self._services.check()
        self._check_signal()

    def _check_signal(self) -> None:
        """A run that learns nothing ends with the reason instead of going round for ever."""
        config = self._stage.orchestrator
        idle = self.train_sink.without_signal
        rounds = len(idle) // config.batch_size
        if rounds > self._warned_rounds and config.constant_batch_size:
            warn_of_no_signal(self.progress.step, self.train_sink.observed)
            warn_of_errors(self.progress.step, self.train_sink.observed)
        self._warned_rounds = rounds
        if rounds >= config.max_empty_batches:
            observed = self.train_sink.observed
            rejected = sum(observed.rejected.values())
            raise RunError(no_signal_reason(rounds, idle, list(observed.errors), rejected))

    def _version_applied(self, version: int) -> None:
        self._recorder.weights_taken(version, self._watcher.update_times_s[-1])
        self._concurrency.weights_updated()
        config = self._stage.orchestrator.eval
        if config is not None and evaluate.is_due(version, config, self._stage.max_steps):
            done = self._recorder.evaluated(version)
            groups = self.eval_sink.start(version, version, skip=done)
            self.dispatcher.enqueue_eval(groups)
        self.dispatcher.pump()
        self._changed.set()

    # Checkpoints

    def _snapshot(self, step: int) -> OrchestratorState | None:
        """The state as of "batch `step` has shipped"; None when it is not to be saved."""
        if not is_due(step, self._stage.ckpt, self._stage.max_steps, self._resumed_after):
            return None
        return OrchestratorState(
            step=step,
            source=self.source.state_dict(),
            algorithms={name: each.state_dict() for name, each in self._algorithms.items()},
            counters={
                "total_tokens": self.progress.total_tokens,
                "total_samples": self.progress.total_samples,
                "total_episodes": self.progress.total_episodes,
            },
            leftover=encode_leftover(self.train_sink.partly_shipped()),
        )

    async def _save(self, step: int, state: OrchestratorState | None) -> float:
        """Seconds it took."""
        if state is None:
            return 0.0
        started = time.monotonic()
        await asyncio.to_thread(self._checkpoints.commit, step, "orchestrator", state.write)
        return time.monotonic() - started

    def _restore(self, state: OrchestratorState) -> None:
        """Raises CheckpointError naming the file."""
        try:
            self._restore_parts(state)
        except CheckpointError as error:
            raise CheckpointError(f"{state.origin}: {error}") from error

    def _restore_parts(self, state: OrchestratorState) -> None:
        groups = decode_leftover(state.leftover)
        self.source.load_state_dict(state.source, kept={group.group_id for group in groups})
        for group in groups:
            self.train_sink.restore(group)
        for name, algorithm in self._algorithms.items():
            restore_algorithm(name, algorithm, state.algorithms.get(name, {}))
        for name, value in state.counters.items():
            setattr(self.progress, name, value)

    async def _report(self) -> None:
        """A progress line every interval."""
        while True:
            await asyncio.sleep(self._stage.log.interval_s)
            if self.progress.step > self._stage.max_steps:
                log.info("every batch has shipped; engines run version %d", self.policy.version)
                continue
            log.info(
                "filling step %d/%d: %d of %d episodes, %d in flight, version %d",
                self.progress.step,
                self._stage.max_steps,
                self.train_sink.available,
                self._stage.orchestrator.batch_size,
                self.dispatcher.inflight,
                self.policy.version,
            )


def restore_algorithm(source: str, algorithm: Algorithm, state: dict[str, Any]) -> None:
    """Raises CheckpointError for whatever the algorithm does not take."""
    try:
        algorithm.load_state_dict(state)
    except Exception as error:  # a plugin's own code may raise anything
        text = str(error) if isinstance(error, ValueError) else what_was_raised(error)
        raise CheckpointError(
            f"{type(algorithm).__name__}, the algorithm of source {source!r}, does not take the "
            f"state of the checkpoint: {text}; found {state!r:.80}. Keep the algorithm that the "
            "checkpoint was made with, or let it start anew: resume.skip_dataloader = true"
        ) from error


def make_train_source(stage: RLConfig, services: Services) -> TrainSource:
    """Over every training source of the stage. Raises ConfigError when a sampler cannot work with
    the tasks of its source."""
    shares, samplers = [], {}
    for source in stage.orchestrator.train.source:
        tasks = services.sources["train", source.label].tasks
        shares.append(SourceShare(source.label, len(tasks), source.ratio))
        samplers[source.label] = make_sampler(
            source.sampler, source.label, [task.key for task in tasks]
        )
    return TrainSource(shares, stage.seed, samplers)


def episode_needs(
    stage: RLConfig, services: Services, algorithms: Mapping[str, Algorithm]
) -> dict[str, EpisodeNeeds]:
    """What the episodes of every training source must bring."""
    return {
        source.label: EpisodeNeeds.of_source(
            source.sampling,
            algorithms[source.label].requirements,
            services.sources["train", source.label].is_frozen,
            stage.trainer.enable_router_replay,
            services.vocabulary,
        )
        for source in stage.orchestrator.train.source
    }


def make_admission(stage: RLConfig) -> Admission:
    """The brakes of the stage's dispatcher."""
    config = stage.orchestrator
    return Admission(
        time.monotonic,
        max_inflight=config.concurrency.largest_inflight,
        largest_group=max(source.group_size for source in config.train.source),
        window_s=config.concurrency.ramp_window_s,
        per_minute=config.dispatch_per_minute,
    )


def make_eval_sink(services: Services, recorder: Recorder) -> EvalSink:
    """Over every evaluation source of the stage."""
    sources = {label: s for (split, label), s in services.sources.items() if split == "eval"}
    return EvalSink(
        {label: len(source.tasks) for label, source in sources.items()},
        {label: source.config.group_size for label, source in sources.items()},
        recorder.evaluation,
    )
