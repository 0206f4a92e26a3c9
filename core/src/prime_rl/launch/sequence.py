"""Runs the stages of a recipe one after the other, and continues where an earlier attempt ended."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from prime_rl.api import Launcher, Process
from prime_rl.configs.model import ResumeConfig
from prime_rl.configs.paths import (
    StagePaths,
    stage_model_dir,
    stage_name,
    stage_paths,
    step_directories,
)
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.control import broadcasts, checkpoints
from prime_rl.control.checkpoints import (
    COMPONENTS,
    complete_steps,
    describe_incomplete,
    resolve_step,
)
from prime_rl.launch.stage import StageProcesses
from prime_rl.plugins import Registry

logger = logging.getLogger(__name__)


class View(Protocol):
    """Somebody who watches a stage."""

    def observe(self) -> None:
        """Called a few times a second."""


ViewFactory = Callable[[str, SFTConfig | RLConfig, StagePaths], AbstractContextManager[View]]


def is_finished(run: RunConfig, index: int) -> bool:
    """True when an earlier attempt completed the stage."""
    return stage_paths(run, index).finished.is_file()


def resolve_resume(run: RunConfig) -> RunConfig:
    """Give every unfinished stage that has a complete checkpoint the step it continues after.

    Raises CheckpointError when a step was asked for by number and is not complete.
    """
    stages = []
    for index, stage in enumerate(run.stages):
        wanted = stage.resume
        if is_finished(run, index) or (wanted is not None and wanted.dir is not None):
            stages.append(stage)
            continue
        paths = stage_paths(run, index)
        step = _resume_step(paths, COMPONENTS[stage.type], wanted.step if wanted else None)
        resume = None
        if step is not None:
            resume = (wanted or ResumeConfig()).model_copy(update={"step": step})
        stages.append(stage.model_copy(update={"resume": resume}))
    return run.model_copy(update={"stages": stages})


def _resume_step(paths: StagePaths, components: tuple[str, ...], wanted: int | None) -> int | None:
    if wanted is not None or complete_steps(paths, components):
        return resolve_step(paths, components, wanted)
    for step, _ in step_directories(paths.checkpoints):
        text = describe_incomplete(paths, step, components)
        logger.warning("ignoring the checkpoint of step %d: %s", step, text)
    logger.warning("%s holds no complete checkpoint: the stage starts over", paths.checkpoints)
    return None


def forget_beyond(paths: StagePaths, step: int) -> None:
    """Remove broadcasts, batches and checkpoints of steps above `step`: an abandoned future."""
    broadcasts.prune_beyond(paths.broadcasts, step)
    checkpoints.prune_beyond(paths, step)
    for number, directory in step_directories(paths.rollouts):
        if number > step:
            shutil.rmtree(directory)


class Sequence:
    """The stages of one attempt."""

    def __init__(self, run: RunConfig, attempt: int, registry: Registry, view: ViewFactory) -> None:
        self._run = run
        self._attempt = attempt
        self._registry = registry
        self._view = view

    def run(self) -> int:
        """Run every stage that is not finished; the exit code of the first that fails, else 0."""
        for index in range(len(self._run.stages)):
            name = stage_name(self._run, index)
            if is_finished(self._run, index):
                logger.info("stage %s is finished already", name)
                continue
            started = time.time()
            code = self._run_stage(index, name)
            if code != 0:
                return code
            seconds = time.time() - started
            _write_finished(stage_paths(self._run, index), self._run.stages[index], seconds)
        return 0

    def _run_stage(self, index: int, name: str) -> int:
        stage = self._run.stages[index]
        paths = stage_paths(self._run, index)
        resume = stage.resume
        forget_beyond(paths, resume.step if resume and resume.step and not resume.dir else 0)
        processes = StageProcesses(self._run, index, self._attempt)
        with self._view(name, stage, paths) as view:
            if isinstance(stage, RLConfig):
                return self._launch(stage, paths, processes.rl(), view)
            return self._run_sft(stage, index, paths, processes, view)

    def _run_sft(
        self,
        stage: SFTConfig,
        index: int,
        paths: StagePaths,
        processes: StageProcesses,
        view: View,
    ) -> int:
        beside: list[Process] = []
        if stage.eval is not None and stage.eval_before and stage.resume is None:
            beside = processes.evaluation(stage_model_dir(self._run, index), step=0)
        code = self._launch(stage, paths, [*processes.sft(), *beside], view)
        if code == 0 and stage.eval is not None and stage.eval_after:
            after = processes.evaluation(paths.export, step=stage.max_steps)
            code = self._launch(stage, paths, after, view)
        return code

    def _launch(
        self,
        stage: SFTConfig | RLConfig,
        paths: StagePaths,
        processes: list[Process],
        view: View,
    ) -> int:
        shutil.rmtree(paths.runtime, ignore_errors=True)
        paths.runtime.mkdir(parents=True)
        launcher_class = self._registry.load("launcher", stage.launcher.type)
        launcher: Launcher = launcher_class(stage.launcher)
        return launcher.run(processes, view.observe)


def _write_finished(paths: StagePaths, stage: SFTConfig | RLConfig, seconds: float) -> None:
    summary = {"steps": stage.max_steps, "seconds": round(seconds, 1)}
    temporary: Path = paths.finished.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary))
    temporary.rename(paths.finished)
