"""Where a run keeps its files. Every process derives the same paths from the resolved run."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig

_STEP = re.compile(r"step_(\d+)")


def step_directories(parent: Path) -> list[tuple[int, Path]]:
    """`step_<n>` folders below parent, in numeric order."""
    if not parent.is_dir():
        return []
    found = [
        (int(match[1]), entry)
        for entry in parent.iterdir()
        if (match := _STEP.fullmatch(entry.name)) and entry.is_dir()
    ]
    return sorted(found)


@dataclass(frozen=True)
class StagePaths:
    """Files of one stage."""

    root: Path
    """The run directory when the run has one stage, else a folder of it."""

    @property
    def checkpoints(self) -> Path:
        """step_<N>/{trainer,orchestrator}/ and a marker step_<N>/<component>.done for each."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """Checkpoint after step `step`."""
        return self.checkpoints / f"step_{step}"

    @property
    def broadcasts(self) -> Path:
        """step_<v>/ with the markers of the weight update to version v."""
        return self.root / "broadcasts"

    @property
    def rollouts(self) -> Path:
        """step_<n>/rank_<r>.bin of the filesystem batch transport."""
        return self.root / "rollouts"

    @property
    def export(self) -> Path:
        """The final weights as a Hugging Face checkpoint."""
        return self.root / "export"

    @property
    def metrics(self) -> Path:
        """<producer>.jsonl, one writer each."""
        return self.root / "monitors" / "file" / "metrics"

    @property
    def traces(self) -> Path:
        """stream.jsonl, stream.index.jsonl and annotations/<producer>.jsonl."""
        return self.root / "monitors" / "file" / "traces"

    @property
    def runtime(self) -> Path:
        """Addresses of the running processes; emptied at every launch."""
        return self.root / "runtime"

    def engine_url(self, index: int) -> Path:
        """Holds the URL of engine `index` once it answers."""
        return self.runtime / f"engine_{index}.url"

    @property
    def router_url(self) -> Path:
        """Holds the router's URL."""
        return self.runtime / "router.url"

    @property
    def batch_address(self) -> Path:
        """Holds the address trainer ranks pull batches from."""
        return self.runtime / "batches.address"

    def environment_address(self, split: str, source: str) -> Path:
        """Holds the address of an environment server."""
        return self.runtime / "envs" / split / f"{source}.address"

    @property
    def finished(self) -> Path:
        """Written when the stage is complete; its content is a JSON summary."""
        return self.root / "finished.json"


@dataclass(frozen=True)
class RunPaths:
    """Files of a run."""

    root: Path

    @property
    def configs(self) -> Path:
        """attempt_<n>/ folders and the link `latest`."""
        return self.root / "configs"

    @property
    def logs(self) -> Path:
        """attempt_<n>/ folders and the link `latest`."""
        return self.root / "logs"

    @property
    def fresh_model(self) -> Path:
        """The model with random weights, when the recipe asks for one."""
        return self.root / "fresh_model"

    def attempts(self) -> list[int]:
        """Numbers of the launches so far, in order."""
        if not self.configs.is_dir():
            return []
        numbers = [
            int(entry.name.removeprefix("attempt_"))
            for entry in self.configs.iterdir()
            if re.fullmatch(r"attempt_\d+", entry.name)
        ]
        return sorted(numbers)

    def resolved(self, attempt: int) -> Path:
        """The resolved run of a launch, as JSON with nulls kept."""
        return self.configs / f"attempt_{attempt}" / "resolved" / "run.json"

    def stage_logs(self, attempt: int, stage: str) -> Path:
        """Log files of a stage's processes."""
        return self.logs / f"attempt_{attempt}" / stage


def stage_name(run: RunConfig, index: int) -> str:
    """Folder name of a stage: its own name, or its type with a number when types repeat."""
    stage = run.stages[index]
    if stage.name:
        return stage.name
    same = [other for other in run.stages if other.type == stage.type and other.name is None]
    return stage.type if len(same) == 1 else f"{stage.type}_{index + 1}"


def stage_paths(run: RunConfig, index: int) -> StagePaths:
    """Paths of stage `index`; a run of one stage uses the run directory itself."""
    if len(run.stages) == 1:
        return StagePaths(run.directory)
    return StagePaths(run.directory / stage_name(run, index))


def stage_model_dir(run: RunConfig, index: int) -> Path:
    """Directory of the weights a stage starts from: its own `model.name`, the fresh model, or the
    previous stage's export."""
    stage: SFTConfig | RLConfig = run.stages[index]
    if stage.model.name is not None:
        return Path(stage.model.name)
    if index > 0:
        return stage_paths(run, index - 1).export
    return RunPaths(run.directory).fresh_model
