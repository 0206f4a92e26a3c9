"""Checkpoints of several components that count only when all of them are whole.

    step_<N>/<component>/...       files of one component, written beside and renamed
    step_<N>/<component>.done      JSON {"files": {relative path: bytes}}, written last

A step is complete when every expected component's marker is there and every file has the size the
marker names. Anything else is as good as absent, whenever the writer was killed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.model import CheckpointConfig
from prime_rl.configs.paths import StagePaths, step_directories
from prime_rl.errors import CheckpointError

log = logging.getLogger(__name__)

COMPONENTS = {"rl": ("trainer", "orchestrator"), "sft": ("trainer",)}
"""Stage type -> components whose state makes up a checkpoint."""


@dataclass(frozen=True)
class ComponentCheckpoint:
    """Writes the parts of one stage's checkpoints."""

    paths: StagePaths

    def commit(self, step: int, component: str, write: Callable[[Path], None]) -> None:
        """Let `write` fill an empty folder, then make it the component's part of `step`."""
        folder = self.begin(step, component)
        write(folder)
        self.finish(step, component)

    def begin(self, step: int, component: str) -> Path:
        """An empty folder to write into; call `finish` when everything is in it."""
        folder = self.unfinished(step, component)
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(parents=True)
        return folder

    def finish(self, step: int, component: str) -> None:
        """Put the folder in its place and mark it whole, replacing an earlier part."""
        unfinished = self.unfinished(step, component)
        final = self.paths.checkpoint(step) / component
        marker = marker_path(self.paths.checkpoint(step), component)
        marker.unlink(missing_ok=True)
        if final.exists():
            shutil.rmtree(final)
        unfinished.rename(final)
        temporary = marker.with_name(marker.name + ".tmp")
        with temporary.open("w") as file:
            json.dump({"files": file_sizes(final)}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(marker)

    def unfinished(self, step: int, component: str) -> Path:
        """The folder that `begin` made."""
        return self.paths.checkpoint(step) / f".{component}.unfinished"


def marker_path(directory: Path, component: str) -> Path:
    """The file that says a component's part of `directory` (step_<N>) is whole."""
    return directory / f"{component}.done"


def file_sizes(folder: Path) -> dict[str, int]:
    """Relative path -> bytes of every file below a folder."""
    return {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def problems(directory: Path, components: Sequence[str]) -> list[str]:
    """What is missing or damaged in one `step_<N>` folder; [] when it is complete."""
    found: list[str] = []
    for component in components:
        marker = marker_path(directory, component)
        try:
            recorded = json.loads(marker.read_text())["files"]
        except FileNotFoundError:
            found.append(f"the part of the {component} was never finished")
            continue
        except (ValueError, KeyError, TypeError, UnicodeDecodeError):
            found.append(f"{marker.name} is damaged")
            continue
        present = file_sizes(directory / component)
        for name, size in recorded.items():
            if name not in present:
                found.append(f"{component}/{name} is missing")
            elif present[name] != size:
                found.append(f"{component}/{name} has {present[name]} bytes instead of {size}")
    return found


def complete_steps(paths: StagePaths, components: Sequence[str]) -> list[int]:
    """Steps whose checkpoint is complete, in numeric order."""
    return [
        step
        for step, directory in step_directories(paths.checkpoints)
        if not problems(directory, components)
    ]


def describe_incomplete(paths: StagePaths, step: int, components: Sequence[str]) -> str:
    """What is missing or damaged in the checkpoint of `step`, for a person; "" when complete."""
    directory = paths.checkpoint(step)
    if not directory.is_dir():
        return f"{directory} does not exist."
    found = problems(directory, components)
    return f"{'; '.join(found)}." if found else ""


def resolve_step(paths: StagePaths, components: Sequence[str], step: int | None) -> int:
    """The step to resume after: `step`, or the newest complete checkpoint.

    Newer incomplete checkpoints are named in a warning. Raises CheckpointError when the wanted
    checkpoint is incomplete or none is complete; a run never starts over silently.
    """
    complete = complete_steps(paths, components)
    if step is not None:
        if step not in complete:
            raise CheckpointError(
                f"cannot resume after step {step}: {describe_incomplete(paths, step, components)} "
                f"Complete checkpoints: {', '.join(map(str, complete)) or 'none'}."
            )
        return step
    incomplete = {
        number: describe_incomplete(paths, number, components)
        for number, _ in step_directories(paths.checkpoints)
        if number not in complete
    }
    if not complete:
        details = "".join(f"\n  step {number}: {text}" for number, text in incomplete.items())
        raise CheckpointError(
            f"cannot resume: {paths.checkpoints} has no complete checkpoint.{details}\n"
            "Start again with --clean, or in another directory."
        )
    for number, text in incomplete.items():
        if number > complete[-1]:
            log.warning("ignoring the checkpoint of step %d: %s", number, text)
    return complete[-1]


def check_directory(directory: Path, components: Sequence[str]) -> int:
    """Step of a `step_<N>` folder, of this run or another, that must be complete."""
    steps = dict((path, step) for step, path in step_directories(directory.parent))
    if directory not in steps:
        raise CheckpointError(f"expected a checkpoint folder called step_<number>: {directory}")
    if found := problems(directory, components):
        raise CheckpointError(f"cannot resume from {directory}: {'; '.join(found)}")
    return steps[directory]


def is_due(
    step: int, config: CheckpointConfig | None, max_steps: int, resumed_after: int = 0
) -> bool:
    """Whether to save after `step`: every `interval` steps and after the last, each once, and not
    again what was just loaded."""
    if config is None or step == resumed_after:
        return False
    return step == max_steps or (config.interval is not None and step % config.interval == 0)


def apply_retention(
    paths: StagePaths, components: Sequence[str], config: CheckpointConfig
) -> list[int]:
    """Remove complete checkpoints that are neither among the `keep_last` newest nor at a multiple of
    `keep_interval`; returns their steps. Incomplete ones may still be in the making and stay."""
    if config.keep_last is None and config.keep_interval is None:
        return []
    complete = complete_steps(paths, components)
    keep = set(complete[-(config.keep_last or 1) :])
    if config.keep_interval is not None:
        keep |= {step for step in complete if step % config.keep_interval == 0}
    removed = [step for step in complete if step not in keep]
    for step in removed:
        remove(paths.checkpoint(step), components)
    return removed


def prune_beyond(paths: StagePaths, step: int) -> None:
    """Remove every checkpoint of later steps: a future that a resume abandons."""
    for number, directory in step_directories(paths.checkpoints):
        if number > step:
            shutil.rmtree(directory)


def remove(directory: Path, components: Sequence[str]) -> None:
    """Delete a checkpoint, markers first: half deleted, it is not taken for whole. Safe when
    another process removes it at the same time."""
    for component in components:
        marker_path(directory, component).unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)
