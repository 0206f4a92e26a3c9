"""Runs the stages of a recipe one after the other, and continues where an earlier attempt ended."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

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
from prime_rl.errors import ConfigError
from prime_rl.launch.stage import StageProcesses
from prime_rl.plugins import Registry

logger = logging.getLogger(__name__)


class View(Protocol):
    """Somebody who watches a stage."""

    def observe(self) -> None:
        """Called a few times a second."""


ViewFactory = Callable[[str, SFTConfig | RLConfig, StagePaths], AbstractContextManager[View]]


def is_finished(run: RunConfig, index: int) -> bool:
    """True when an earlier attempt completed the stage, all the steps it has now."""
    finished = stage_paths(run, index).finished
    return finished.is_file() and _record(finished)["steps"] >= run.stages[index].max_steps


def resolve_resume(run: RunConfig) -> RunConfig:
    """Give every unfinished stage that has a complete checkpoint the step it continues after.

    Raises CheckpointError when a step was asked for by number and is not complete, and ConfigError
    when a stage was finished with other settings than it has now; only its max_steps may grow.
    """
    _check_finished_stages(run)
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


def _check_finished_stages(run: RunConfig) -> None:
    """What is finished stays what it was, or the record of the run would lie."""
    finished = [i for i in range(len(run.stages)) if stage_paths(run, i).finished.is_file()]
    for index in finished:
        stage, paths = run.stages[index], stage_paths(run, index)
        record = _record(paths.finished)
        different = _differences(record["settings"], _settings(stage))
        if not different:
            continue
        where = f"stage {stage_name(run, index)} is finished"
        if different.keys() != {"max_steps"} or stage.max_steps < record["steps"]:
            listed = "".join(
                f"\n  {key}: was {old!r}, now {new!r}" for key, (old, new) in different.items()
            )
            raise ConfigError(
                f"{where}; it cannot be resumed with other settings:{listed}\n"
                "Give the new settings a run of their own with --run.name, or leave them out."
            )
        if index != finished[-1]:
            raise ConfigError(
                f"{where} and later stages continued from it; it cannot be made longer. Give the "
                "longer run another --run.name"
            )
        if not complete_steps(paths, COMPONENTS[stage.type]):
            raise ConfigError(
                f"{where} and left no checkpoint to continue from ({paths.checkpoints}); a run that "
                "is to be made longer needs a [ckpt] section"
            )


def _record(finished: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads(finished.read_text())
    return record


def _settings(stage: SFTConfig | RLConfig) -> dict[str, Any]:
    """Everything that says how a stage is trained."""
    return stage.model_dump(mode="json", exclude={"resume", "log", "launcher"})


def _differences(old: Any, new: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value)."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in sorted(old.keys() | new.keys()):
            found |= _differences(old.get(key), new.get(key), f"{path}.{key}" if path else key)
        return found
    return {} if old == new else {path: (old, new)}


def _resume_step(paths: StagePaths, components: tuple[str, ...], wanted: int | None) -> int | None:
    if wanted is not None or complete_steps(paths, components):
        return resolve_step(paths, components, wanted)
    for step, _ in step_directories(paths.checkpoints):
        text = describe_incomplete(paths, step, components)
        logger.warning("ignoring the checkpoint of step %d: %s", step, text)
    logger.warning("%s holds no complete checkpoint: the stage starts over", paths.checkpoints)
    return None


def forget_beyond(paths: StagePaths, step: int) -> None:
    """Remove broadcasts, batches and checkpoints of steps above `step`: an abandoned future.

    The broadcast of `step` itself goes too: the trainer offers that version anew, and engines must
    not take the old payload while it is being replaced.
    """
    broadcasts.prune_beyond(paths.broadcasts, step - 1)
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
    summary = {
        "steps": stage.max_steps,
        "seconds": round(seconds, 1),
        "settings": _settings(stage),
    }
    temporary: Path = paths.finished.with_suffix(".tmp")
    temporary.write_text(json.dumps(summary))
    temporary.rename(paths.finished)
