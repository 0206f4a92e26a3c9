"""The run directory: guard against reuse, numbered attempts, the hand-written input of each."""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from prime_rl.configs.arguments import RunArguments
from prime_rl.configs.paths import RunPaths
from prime_rl.configs.run import RunConfig
from prime_rl.errors import RunError

NOT_RESULTS = ("configs", "logs")
"""Entries that a launch leaves behind even when it trained nothing."""

LATEST = "latest"
MOST_LISTED = 5


def prepare_attempt(run: RunConfig, arguments: RunArguments, inputs: Sequence[Path]) -> int:
    """Make the folders of a new attempt and copy its input there; returns its number, from 1.

    A directory that holds results is refused unless `--resume` or `--clean` is given; `--clean`
    empties it first. A dry run neither minds nor deletes results, and
    `latest` stays with the last real one. Raises RunError.
    """
    directory = run.directory
    check_inside(run.output_dir, directory)
    if arguments.clean and not arguments.dry_run:
        delete_run(run.output_dir, directory)
    if not arguments.dry_run:
        _guard(run, arguments)
    paths = RunPaths(directory)
    number = _make_attempt(paths)
    copy_inputs(inputs, paths.configs / f"attempt_{number}")
    if arguments.words:
        words = shlex.join(arguments.words)
        (paths.configs / f"attempt_{number}" / "command.txt").write_text(f"prime run {words}\n")
    if not arguments.dry_run:
        for parent in (paths.configs, paths.logs):
            point_latest(parent, f"attempt_{number}")
    return number


def check_inside(output_dir: Path, directory: Path) -> None:
    """Refuse a run directory that is not really below `output_dir`: `..`, links, the folder itself.

    Raises RunError.
    """
    try:
        parts = directory.relative_to(output_dir).parts
    except ValueError:
        parts = ()
    if not parts or ".." in parts:
        raise RunError(
            f"the run directory {directory} is not below output_dir {output_dir}; "
            "run.name and run.dir must stay inside it"
        )
    place = output_dir
    for part in parts:
        place = place / part
        if place.is_symlink():
            raise RunError(
                f"{place} is a symbolic link; a run directory must be a real folder below "
                f"output_dir. Make {output_dir} itself the link, or choose another --run.name"
            )


def delete_run(output_dir: Path, directory: Path) -> None:
    """Delete a run directory and everything in it; one that does not exist is fine.

    Only a folder below `output_dir` that has attempts of ours in it is ever deleted. Raises
    RunError.
    """
    check_inside(output_dir, directory)
    if not directory.exists():
        return
    if not directory.is_dir():
        raise RunError(f"{directory} is a file, expected a run directory")
    if any(directory.iterdir()) and not RunPaths(directory).attempts():
        raise RunError(
            f"{directory} does not look like a run (it has no configs/attempt_<n>), so --clean "
            "does not delete it; choose another --run.name or delete it yourself"
        )
    doomed = directory.with_name(f".{directory.name}.deleting.{os.getpid()}")
    directory.rename(doomed)  # whole or not at all, should we be killed
    shutil.rmtree(doomed)


def results_in(directory: Path) -> list[str]:
    """Names of entries that show that a run was here before."""
    if not directory.is_dir():
        return []
    return sorted(entry.name for entry in directory.iterdir() if entry.name not in NOT_RESULTS)


def _guard(run: RunConfig, arguments: RunArguments) -> None:
    directory = run.directory
    if directory.exists() and not directory.is_dir():
        raise RunError(f"{directory} is a file, expected a run directory")
    results = results_in(directory)
    resume = arguments.resume
    if resume is None and results:
        listed = ", ".join(results[:MOST_LISTED])
        raise RunError(
            f"{directory} already holds a run ({listed}). Continue it with --resume, delete it "
            "with --clean, or give this run another --run.name"
        )
    if resume is not None and resume.dir is None and not RunPaths(directory).attempts():
        known = ", ".join(_newest_runs(run.output_dir)) or "none"
        raise RunError(
            f"there is no run at {directory} to resume; name it with --run.name. "
            f"Newest runs in {run.output_dir}: {known}"
        )


def _newest_runs(output_dir: Path) -> list[str]:
    if not output_dir.is_dir():
        return []
    runs = [entry for entry in output_dir.iterdir() if (entry / "configs").is_dir()]
    runs.sort(key=lambda entry: (entry / "configs").stat().st_mtime, reverse=True)
    return [entry.name for entry in runs[:MOST_LISTED]]


def _make_attempt(paths: RunPaths) -> int:
    """Create configs/attempt_<n> and logs/attempt_<n> for the first free number."""
    paths.configs.mkdir(parents=True, exist_ok=True)
    number = max(paths.attempts(), default=0) + 1
    while True:
        try:
            (paths.configs / f"attempt_{number}").mkdir()
        except FileExistsError:  # another launch was faster
            number += 1
        else:
            (paths.logs / f"attempt_{number}").mkdir(parents=True, exist_ok=True)
            return number


def copy_inputs(inputs: Sequence[Path], folder: Path) -> None:
    """Copy hand-written files under their own names; a name that occurs again gets a number."""
    for position, source in enumerate(inputs):
        target = folder / source.name
        if target.exists():
            target = folder / f"{position + 1}_{source.name}"
        shutil.copyfile(source, target)


def point_latest(parent: Path, target: str) -> None:
    """Make `<parent>/latest` a link to `target`; at no moment is there none or a broken one."""
    temporary = parent / f".{LATEST}.{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    temporary.replace(parent / LATEST)
