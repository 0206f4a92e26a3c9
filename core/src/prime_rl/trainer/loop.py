"""What both kinds of stage share: set-up, resume, one loop, checkpoints, metrics, export."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import torch

from prime_rl.api import Loss, NamedTensor
from prime_rl.configs.paths import StagePaths, stage_model_dir, stage_paths
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.control.checkpoints import (
    COMPONENTS,
    ComponentCheckpoint,
    apply_retention,
    check_directory,
    is_due,
    resolve_step,
)
from prime_rl.models.kept import kept_tensors
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.setup import ModelSetup, prepare
from prime_rl.models.tensor_files import TensorFiles
from prime_rl.parallel.collectives import barrier, sum_over_ranks
from prime_rl.parallel.world import World
from prime_rl.plugins import Registry
from prime_rl.plugins.hooks import Hooks
from prime_rl.traces.metrics import MetricsWriter
from prime_rl.trainer.checkpoint import COMPONENT, TrainerState, load_state, save_state
from prime_rl.trainer.feed import Feed
from prime_rl.trainer.garbage import GarbageControl
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.schedule import Schedule
from prime_rl.trainer.setup import build_policy, compute_dtype, set_up_torch
from prime_rl.trainer.speed import TRAINING_FACTOR, peak_flops, speed_metrics
from prime_rl.trainer.step import StepBatch, Stepper, StepResult

log = logging.getLogger(__name__)


class TrainingLoop:
    """A stage's trainer on one rank. Subclasses say where batches come from and what follows a
    step."""

    def __init__(
        self,
        run: RunConfig,
        index: int,
        world: World,
        registry: Registry,
        hooks: Hooks,
    ) -> None:
        self.run_config = run
        self.stage: RLConfig | SFTConfig = run.stages[index]
        self.paths: StagePaths = stage_paths(run, index)
        self.world = world
        self.registry = registry
        self.hooks = hooks
        self.model_dir = stage_model_dir(run, index)
        self.setup: ModelSetup = prepare(self.stage.model, self.model_dir, registry)
        self.dtype = compute_dtype(self.stage.model, world.device)
        set_up_torch(self.stage.trainer, world.device, self.stage.seed)
        self.policy = build_policy(self.stage, self.setup, self.model_dir, world)
        self.state = self._make_state()
        self.resumed_after = self._resume()
        self.stepper = Stepper(
            self.policy,
            self._make_loss(),
            self.state.optimizer,
            self.state.schedule,
            world,
            self.stage.trainer.optim.max_norm,
            keep_traces=self.keeps_traces,
            experts=self._experts(),
        )
        self._peak = peak_flops(world.device) if world.is_master else None
        self._metrics: MetricsWriter | None = None
        self._last_line_at = 0.0

    keeps_traces = False
    """Whether `after_step` uses the per-token results."""

    def make_feed(self, first_step: int) -> Feed:
        """Batches from `first_step` to the last."""
        raise NotImplementedError

    def before_loop(self) -> None:
        """Runs once, before the first batch."""

    def after_step(self, step: int, result: StepResult) -> dict[str, float]:
        """Runs right after the weights moved; returns more metrics of the step."""
        return {}

    def before_checkpoint(self) -> None:
        """Runs before a checkpoint is written: finish what must not be lost behind it."""

    def run(self) -> None:
        """Train to the last step and export the weights."""
        if self.world.is_master:
            self._metrics = MetricsWriter(self.paths.metrics / "trainer.jsonl")
        self.before_loop()
        feed = self.make_feed(self.resumed_after + 1)
        garbage = GarbageControl(self.stage.trainer.gc_interval)
        try:
            for step in range(self.resumed_after + 1, self.stage.max_steps + 1):
                self._step(step, feed)
                garbage.after_step(step)
        finally:
            feed.close()
            garbage.close()
        self._export()
        if self._metrics is not None:
            self._metrics.close()

    def _step(self, step: int, feed: Feed) -> None:
        started = time.perf_counter()
        batch: StepBatch = feed.next_batch()
        wait_s = time.perf_counter() - started
        result = self.stepper.step(batch)
        trained_s = time.perf_counter() - started - wait_s
        self._count(step, result, feed)
        metrics = dict(result.metrics)
        metrics |= self.after_step(step, result)
        metrics["time/save_ckpt"] = self._save_if_due(step)
        metrics["time/wait_for_batch"] = wait_s
        metrics["time/load_data"] = result.load_s
        metrics["time/forward_backward"] = result.compute_s
        metrics["time/step"] = time.perf_counter() - started
        metrics |= self._speed(result, trained_s)
        self._report(step, metrics)

    def _count(self, step: int, result: StepResult, feed: Feed) -> None:
        """The step is done: only now does anything count it."""
        progress = self.state.progress
        progress.step = step
        progress.total_tokens += int(result.totals.tokens)
        progress.total_samples += int(result.totals.documents)
        self.state.data_state = feed.data_state

    def _speed(self, result: StepResult, seconds: float) -> dict[str, float]:
        forward = self.setup.plugin.flops(self.setup.architecture, result.lengths)
        (flops,) = sum_over_ranks(self.world, [TRAINING_FACTOR * forward])
        metrics = speed_metrics(result.totals.tokens, flops, seconds, self.world.size, self._peak)
        if self.world.device.type == "cuda":
            metrics["perf/peak_memory"] = torch.cuda.max_memory_allocated() / 2**30
        return metrics

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if self._metrics is None:
            return
        progress = self.state.progress
        metrics["progress/step"] = step
        metrics["progress/total_tokens"] = progress.total_tokens
        metrics["progress/total_samples"] = progress.total_samples
        self._metrics.write(step, metrics)
        self.hooks.tell("step_metrics", step=step, metrics=metrics, role="trainer")
        now = time.monotonic()
        if now - self._last_line_at >= self.stage.log.interval_s or step == self.stage.max_steps:
            self._last_line_at = now
            log.info(
                "step %d/%d loss %.4f grad_norm %.3g lr %.3g %.0f tokens/s %.2f s",
                step,
                self.stage.max_steps,
                metrics["loss/mean"],
                metrics["optim/grad_norm"],
                metrics["optim/lr"],
                metrics["perf/throughput"],
                metrics["time/step"],
            )

    def _make_state(self) -> TrainerState:
        trainer = self.stage.trainer
        return TrainerState(
            model=self.policy.model,
            optimizer=build_optimizer(trainer.optim, self.policy.parameters(), self.stage.type),
            schedule=Schedule(trainer.schedule, trainer.optim.lr, self.stage.max_steps),
        )

    def _make_loss(self) -> Loss:
        section = self.stage.trainer.loss
        loss = self.registry.load("loss", section.type)(section)
        assert isinstance(loss, Loss)
        return loss

    def _experts(self) -> int:
        """Experts per layer to report the load of; compiled blocks cannot be watched."""
        routers = self.setup.plugin.router_parameters(self.policy.model)
        return routers[0].shape[0] if routers and not self.stage.trainer.memory.compile else 0

    def _resume(self) -> int:
        """Load the checkpoint that the run continues from; the step it was saved after, or 0."""
        resume = self.stage.resume
        if resume is None:
            return 0
        components = COMPONENTS[self.stage.type]
        if resume.dir is not None:
            check_directory(resume.dir, components)
            folder = resume.dir
        else:
            folder = self.paths.checkpoint(resolve_step(self.paths, components, resume.step))
        load_state(folder / COMPONENT, self.state, resume, self.world)
        return self.state.progress.step

    def _save_if_due(self, step: int) -> float:
        """Seconds it took; 0 when no checkpoint was due."""
        config = self.stage.ckpt
        if config is None or not is_due(step, config, self.stage.max_steps, self.resumed_after):
            return 0.0
        started = time.perf_counter()
        self.before_checkpoint()
        save_state(ComponentCheckpoint(self.paths), self.state, self.world)
        if self.world.is_master:
            apply_retention(self.paths, COMPONENTS[self.stage.type], config)
        seconds = time.perf_counter() - started
        log.info("step %d: checkpoint saved in %.2f s", step, seconds)
        return seconds

    def weights(self) -> Iterator[NamedTensor]:
        """All weights under their checkpoint names in the compute dtype; a collective."""
        return iter_checkpoint(self.policy.model, self.setup.layout, self.dtype)

    def _export(self) -> None:
        """The final weights as a Hugging Face checkpoint, complete or absent."""
        config = self.setup.export_config()
        config["dtype"] = str(self.dtype).removeprefix("torch.")
        config.pop("torch_dtype", None)
        kept: Iterator[NamedTensor] = iter(())
        if self.world.is_master:
            kept = kept_tensors(self.setup.layout, TensorFiles(self.model_dir), self.dtype)
        save_checkpoint(
            self.paths.export,
            chain(self.weights(), kept),
            config,
            self._tokenizer_dir(),
            write=self.world.is_master,
        )
        barrier(self.world)
        log.info("exported the weights to %s", self.paths.export)

    def _tokenizer_dir(self) -> Path:
        name = self.stage.tokenizer.name
        return self.model_dir if name is None else Path(name)
