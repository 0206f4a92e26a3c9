"""Writes what the orchestrator leaves behind: episodes, advantages, metrics of steps and evaluations."""

from __future__ import annotations

from collections.abc import Mapping

from prime_rl.configs.paths import StagePaths
from prime_rl.orchestrator.episode import EpisodeResult
from prime_rl.orchestrator.records import stored_record
from prime_rl.orchestrator.sink import Batch
from prime_rl.plugins.hooks import Hooks
from prime_rl.traces import AnnotationWriter, EpisodeStream, MetricsWriter, read_metrics

EVAL_NAME = "eval.jsonl"


class Recorder:
    """One writer per file; open for the life of the orchestrator."""

    def __init__(self, paths: StagePaths, save_episodes: bool, hooks: Hooks | None = None) -> None:
        self._hooks = hooks or Hooks()
        self._eval_path = paths.metrics / EVAL_NAME
        self._steps = MetricsWriter(paths.metrics / "orchestrator.jsonl")
        self._evaluations = MetricsWriter(self._eval_path)
        self._stream = EpisodeStream(paths.traces) if save_episodes else None
        self._annotations = (
            AnnotationWriter(paths.traces, "orchestrator") if save_episodes else None
        )

    def episode(self, result: EpisodeResult, task_key: str) -> None:
        """Store a finished episode."""
        if self._stream is not None:
            self._stream.append(stored_record(result, task_key))
            request = result.request
            self._hooks.tell(
                "trace_event",
                event="episode",
                episode_id=result.id,
                fields={
                    "split": request.split,
                    "source": request.source,
                    "group": request.group_id,
                    "outcome": result.outcome,
                    "reward": result.reward,
                },
            )

    def step(self, step: int, batch: Batch, metrics: Mapping[str, float]) -> None:
        """A batch has shipped."""
        self._steps.write(step, metrics)
        self._hooks.tell("step_metrics", step=step, metrics=metrics, role="orchestrator")
        if self._annotations is None:
            return
        for episode in batch.episodes:
            for each in episode.annotations:
                self._annotations.write(
                    each.trace_id, each.branch_index, step, {"advantages": each.advantages}
                )
        self._annotations.flush()

    def weights_taken(self, version: int, seconds: float) -> None:
        """The engines run a new version; the update took `seconds`."""
        self._hooks.tell("weight_update", version=version, seconds=seconds, role="engine")

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """A source has been evaluated."""
        self._evaluations.write(step, metrics)

    def evaluated(self, step: int) -> set[str]:
        """Sources with a row for `step`: an earlier attempt evaluated them."""
        suffix = "/reward/mean"
        return {
            key.removeprefix("eval/").removesuffix(suffix)
            for row in read_metrics(self._eval_path)
            if row["step"] == step
            for key in row
            if key.startswith("eval/") and key.endswith(suffix)
        }

    def close(self) -> None:
        """Release the files."""
        for writer in (self._steps, self._evaluations, self._stream, self._annotations):
            if writer is not None:
                writer.close()
