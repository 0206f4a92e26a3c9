"""A run: one or more stages, each a complete specification from which every process derives."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from prime_rl.configs import former_keys
from prime_rl.configs.base import BaseConfig, default_type, defaults, plugin_section
from prime_rl.configs.inference import InferenceConfig
from prime_rl.configs.model import (
    CheckpointConfig,
    ModelConfig,
    ResumeConfig,
    TokenizerConfig,
)
from prime_rl.configs.orchestrator import EvalSourcesConfig, OrchestratorConfig
from prime_rl.configs.trainer import (
    ConstantScheduleConfig,
    LinearScheduleConfig,
    TrainerConfig,
)


class RunIdentity(BaseConfig):
    """Name and place of a run."""

    name: str | None = None
    """Name; None: made from sources and model."""
    dir: str | None = None
    """Folder below output_dir; None: the name."""


class PluginsConfig(BaseConfig):
    """Which installed plugins may be used. Read before any plugin is imported."""

    allow: list[str] | None = None
    """Only these plugins (and core's own); None: all."""
    deny: list[str] = []
    """Never these."""
    required: list[str] = []
    """Fail when one of these is missing."""


class LogConfig(BaseConfig):
    """Logging."""

    former = former_keys.LOG

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level that is written."""
    interval_s: float = Field(10.0, gt=0)
    """Seconds between progress lines."""


class StageConfig(BaseConfig):
    """What every kind of stage has."""

    former = former_keys.STAGE

    name: str | None = None
    """Folder of the stage inside the run directory; None: its type."""
    model: ModelConfig = defaults()
    """Which model."""
    tokenizer: TokenizerConfig = defaults()
    """Tokenizer and renderer."""
    seq_len: int = Field(2048, ge=2)
    """Longest sample and packed row, in tokens."""
    max_steps: int = Field(ge=1)
    """Optimizer steps."""
    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and everything else that is random."""
    trainer: TrainerConfig = defaults()
    """Optimisation."""
    ckpt: CheckpointConfig | None = None
    """Checkpoints; None: none are written."""
    resume: ResumeConfig | None = None
    """Set by `--resume`."""
    log: LogConfig = defaults()
    """Logging."""
    launcher: plugin_section("launcher", default="local") = defaults()  # type: ignore[valid-type]
    """Who starts the processes."""
    plugins: PluginsConfig = defaults()
    """Which plugins may be used."""
    env_vars: dict[str, str] = {}
    """Environment variables of every process."""

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        schedule = self.trainer.schedule
        if isinstance(schedule, ConstantScheduleConfig):
            return self  # a run shorter than its warm-up just does not reach the peak
        decay_steps = schedule.decay_steps if isinstance(schedule, LinearScheduleConfig) else 0
        if schedule.warmup_steps + decay_steps > self.max_steps:
            raise ValueError(
                f"trainer.schedule ({schedule.type}): warmup_steps {schedule.warmup_steps} + "
                f"decay_steps {decay_steps} exceed max_steps {self.max_steps}; "
                "set fewer, or train longer"
            )
        return self


class SFTDataConfig(BaseConfig):
    """Rows to fine-tune on: `messages`, or `prompt` and `completion`."""

    former = former_keys.SFT_DATA

    source: str
    """A .jsonl file, or `module:function` that yields rows."""
    arguments: dict[str, Any] = {}
    """Keyword arguments of the function."""
    batch_size: int = Field(128, ge=1)
    """Samples per step."""
    shuffle: bool = True
    """Shuffle each pass, with the run's seed plus the pass number."""


class SFTConfig(StageConfig):
    """Supervised fine-tuning."""

    former = former_keys.SFT

    type: Literal["sft"] = "sft"
    data: SFTDataConfig
    """What to train on."""
    eval: EvalSourcesConfig | None = None
    """Environments to evaluate on; None: none."""
    eval_before: bool = True
    """Evaluate the weights the stage starts from, beside the training."""
    eval_after: bool = True
    """Evaluate the weights the stage ends with. A following RL stage evaluates them too."""
    inference: InferenceConfig = defaults()
    """Engine of the evaluation."""
    router: plugin_section("router", default="sticky") = defaults()  # type: ignore[valid-type]
    """Chooses the engine of a session."""


class RLConfig(StageConfig):
    """Asynchronous reinforcement learning."""

    type: Literal["rl"] = "rl"
    orchestrator: OrchestratorConfig
    """Tasks, episodes, advantages, batches."""
    inference: InferenceConfig = defaults()
    """Engines."""
    router: plugin_section("router", default="sticky") = defaults()  # type: ignore[valid-type]
    """Chooses the engine of a session."""
    weight_broadcast: plugin_section("weight_transport", default="filesystem") = defaults()  # type: ignore[valid-type]
    """How new weights reach the engines."""
    weight_broadcast_timeout_s: float = Field(3600.0, gt=0)
    """Seconds either side of a weight update waits for the other."""
    weight_rounding: Literal["nearest", "stochastic_fp8"] = "nearest"
    """How trained weights reach engines that keep them in FP8. nearest: as they are, the engine
    rounds. stochastic_fp8: on the e4m3 grid of 128 x 128 blocks with power-of-two scales, each up
    or down at random with its own mean, drawn anew for every version; an engine whose scales are
    powers of two keeps exactly these."""


Stage = Annotated[SFTConfig | RLConfig, Field(discriminator="type"), default_type("rl")]


class RunConfig(BaseConfig):
    """A resolved recipe: what is saved in the run directory and what every process is started with."""

    run: RunIdentity = defaults()
    """Name and place."""
    output_dir: Path = Path("outputs")
    """Folder of all runs."""
    stages: list[Stage] = Field(min_length=1)
    """Stages in order. A stage without `model.name` starts from the previous stage's weights."""
    plugin_versions: list[dict[str, str]] = []
    """Every plugin the run resolved, with distribution and version (`Registry.table()`); written
    when the recipe is resolved and checked by every process (`Registry.verify_table()`)."""

    @property
    def directory(self) -> Path:
        """The run directory."""
        name = self.run.dir or self.run.name
        if name is None:
            raise ValueError("the run has no name yet; it is given when the recipe is resolved")
        return self.output_dir / name
