"""Which processes a stage consists of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from prime_rl.api import Process
from prime_rl.configs.orchestrator import EvalSourceConfig, TrainSourceConfig
from prime_rl.configs.paths import RunPaths, stage_name
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig

BASE_ENVIRONMENT = {
    "PYTHONUNBUFFERED": "1",
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""Defaults of every process; the recipe's `env_vars` win."""


def stage_sources(
    stage: SFTConfig | RLConfig,
) -> Iterator[tuple[str, TrainSourceConfig | EvalSourceConfig]]:
    """Every source of a stage with its split: train or eval."""
    if isinstance(stage, RLConfig):
        yield from (("train", source) for source in stage.orchestrator.train.source)
        evaluated = stage.orchestrator.eval
    else:
        evaluated = stage.eval
    if evaluated is not None:
        yield from (("eval", source) for source in evaluated.source)


class StageProcesses:
    """Makes the `Process` records of one stage of one attempt."""

    def __init__(self, run: RunConfig, index: int, attempt: int) -> None:
        paths = RunPaths(run.directory)
        self.run = run
        self.index = index
        self.stage: SFTConfig | RLConfig = run.stages[index]
        self.config_file = paths.resolved(attempt)
        self.logs = paths.stage_logs(attempt, stage_name(run, index))

    def rl(self) -> list[Process]:
        """Engines, environment servers, orchestrator and trainer."""
        return [
            *self._engines(self.rl_stage.inference.replicas, []),
            *self._environment_servers(),
            self._process("orchestrator", ["orchestrator"], ends_run=True),
            self._trainer(),
        ]

    def sft(self) -> list[Process]:
        """The trainer."""
        return [self._trainer()]

    def evaluation(self, model_dir: Path, step: int) -> list[Process]:
        """Everything that evaluates one set of weights and then ends. `step` labels the result."""
        label = f"eval_{step}"
        replicas = self.stage.inference.replicas
        return [
            *self._engines(replicas, ["--model-dir", str(model_dir)], prefix=f"{label}_"),
            *self._environment_servers(prefix=f"{label}_"),
            self._process(
                f"{label}_orchestrator",
                ["orchestrator", "--evaluate-step", str(step)],
                ends_run=True,
            ),
        ]

    @property
    def rl_stage(self) -> RLConfig:
        """The stage, known to be RL."""
        assert isinstance(self.stage, RLConfig)
        return self.stage

    def _engines(self, count: int, extra: list[str], prefix: str = "") -> Iterator[Process]:
        if self.stage.inference.base_url is not None:
            return
        for index in range(count):
            yield self._process(f"{prefix}engine_{index}", ["serve", "--index", str(index), *extra])

    def _environment_servers(self, prefix: str = "") -> Iterator[Process]:
        for split, source in stage_sources(self.stage):
            arguments = ["env-server", "--split", split, "--source", source.label]
            yield self._process(f"{prefix}env_{split}_{source.label}", arguments)

    def _trainer(self) -> Process:
        ranks = self.stage.trainer.parallel.ranks
        if ranks == 1:
            return self._process("trainer", ["trainer"], ends_run=True)
        launcher = [
            *("-m", "prime_rl.control.lifetime", sys.executable),
            *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)),
        ]
        return self._process("trainer", ["trainer"], ends_run=True, launcher=launcher)

    def _process(
        self,
        name: str,
        arguments: list[str],
        *,
        ends_run: bool = False,
        launcher: list[str] | None = None,
    ) -> Process:
        command, *rest = arguments
        return Process(
            name=name,
            command=[
                sys.executable,
                *(launcher or []),
                *("-m", "prime_rl.cli.main", command),
                *("--config", str(self.config_file), "--stage", str(self.index)),
                *rest,
            ],
            log=self.logs / f"{name}.log",
            environment={**BASE_ENVIRONMENT, **self.stage.env_vars},
            ends_run=ends_run,
        )
