"""The `[orchestrator]` section: sources, groups, sampling, dispatch, batches."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from prime_rl.configs import former_keys
from prime_rl.configs.base import BaseConfig, defaults, plugin_section
from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.configs.curriculum import AdvantageRangeConfig, SamplerConfig

RESERVED_SOURCE_NAMES = ("all", "agg")
SMALLEST_TEMPERATURE = 0.01
"""Logits are divided by it."""


class SelectConfig(BaseConfig):
    """Which tasks of a source are used; applied in the order of the fields."""

    former = former_keys.SELECT

    include: list[int] | None = None
    """Indices of tasks to take; None: all."""
    exclude: list[int] = []
    """Indices of tasks to leave out."""
    shuffle: int | None = None
    """Seed of a shuffle; None: source order."""
    skip: int = Field(0, ge=0)
    """Tasks to skip at the front."""
    limit: int | None = Field(None, ge=1)
    """Most tasks to use; None: all."""


class SamplingConfig(BaseConfig):
    """How an engine samples."""

    former = former_keys.SAMPLING

    temperature: float = Field(1.0, ge=0, le=2)
    """Softmax temperature, at least 0.01; 0 is greedy (evaluation only)."""
    max_completion_tokens: int | None = Field(None, ge=1)
    """Most tokens per turn; None: what the sequence length leaves."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus bound."""
    top_k: int | None = Field(None, ge=1)
    """Most candidates; None: all."""
    seed: int | None = Field(None, ge=0)
    """Seed of the sampler; None: drawn by the engine."""

    @field_validator("temperature")
    @classmethod
    def _logits_stay_finite(cls, temperature: float) -> float:
        if 0 < temperature < SMALLEST_TEMPERATURE:
            raise ValueError(
                f"found the number {temperature}, expected 0 (greedy) or a number >= "
                f"{SMALLEST_TEMPERATURE} and <= 2"
            )
        return temperature


class SourceConfig(BaseConfig):
    """One environment to draw tasks from."""

    former = former_keys.SOURCE

    env: dict[str, Any]
    """Environment of the `verifiers` library: `{taskset = {id = "...", ...}, ...}`."""
    name: str | None = None
    """Unique name in metrics; None: the task set's id."""
    select: SelectConfig = defaults()
    """Which tasks."""
    group_size: int = Field(1, ge=1)
    """Episodes per task."""
    sampling: SamplingConfig = defaults()
    """How episodes are sampled."""

    @property
    def label(self) -> str:
        """The source's name, or its task set's id."""
        return self.name or self.task_set or "source"

    @property
    def task_set(self) -> str:
        """Id of the task set; "" when `env` does not name one."""
        found = _tag(self.env, "taskset", "id")
        return found if isinstance(found, str) else ""


class TrainSourceConfig(SourceConfig):
    """One environment that is trained on."""

    former = former_keys.TRAIN_SOURCE

    ratio: float = Field(1.0, gt=0, le=1e6)
    """Weight against the other sources."""
    algo: plugin_section("algorithm", default="grpo") | None = None  # type: ignore[valid-type]
    """Algorithm of this source; None: the group default."""
    sampler: SamplerConfig = defaults()
    """Which task comes next."""
    gates: list[AdvantageRangeConfig] = []
    """Which groups may train: those that every gate lets pass."""


class EvalSourceConfig(SourceConfig):
    """One environment that is evaluated."""

    former = former_keys.EVAL_SOURCE


class SourceDefaultsConfig(BaseConfig):
    """What every source of a group inherits, key by key, unless it says otherwise itself.

    A source of another task set keeps its own `env`.
    """

    former = former_keys.GROUP

    env: dict[str, Any] = {}
    """Default of every source's `env`."""
    select: SelectConfig = defaults()
    """Default of every source's `select`."""
    group_size: int = Field(1, ge=1)
    """Default of every source's `group_size`."""
    sampling: SamplingConfig = defaults()
    """Default of every source's `sampling`."""

    @model_validator(mode="before")
    @classmethod
    def _give_to_sources(cls, data: Any) -> Any:
        return with_inherited(data) if isinstance(data, dict) else data


class TrainSourcesConfig(SourceDefaultsConfig):
    """Training sources; the fields beside `source` are defaults that every source inherits."""

    former = former_keys.TRAIN_GROUP

    source: list[TrainSourceConfig] = Field(min_length=1)
    """The sources."""
    algo: plugin_section("algorithm", default="grpo") = defaults()  # type: ignore[valid-type]
    """Algorithm of every source that names none."""

    @model_validator(mode="before")
    @classmethod
    def _give_to_sources(cls, data: Any) -> Any:
        return with_inherited(data, {"algo": {}}) if isinstance(data, dict) else data


class EvalSourcesConfig(SourceDefaultsConfig):
    """Evaluation sources."""

    former = former_keys.EVAL_GROUP

    source: list[EvalSourceConfig] = Field(min_length=1)
    """The sources."""
    interval: int = Field(100, ge=1)
    """Steps between evaluations; the last version is always evaluated."""
    skip_first_step: bool = False
    """Do not evaluate version 0."""


INHERITED = ("env", "select", "sampling", "group_size", "algo")
"""Keys of a group that its sources inherit."""


def with_inherited(group: dict[str, Any], always: dict[str, Any] | None = None) -> dict[str, Any]:
    """The group with its defaults merged into every source that is a plain table."""
    given = {**(always or {}), **group}
    shared = {key: given[key] for key in INHERITED if given.get(key) is not None}
    sources = group.get("source")
    if not isinstance(sources, list):
        return group
    merged = [inherit(shared, one) if isinstance(one, dict) else one for one in sources]
    return {**group, "source": merged}


def all_inherited(raw: Any) -> Any:
    """A raw run, or a part of it, with the defaults of every group in its sources."""
    if isinstance(raw, list):
        return [all_inherited(one) for one in raw]
    if not isinstance(raw, dict):
        return raw
    return with_inherited({key: all_inherited(value) for key, value in raw.items()})


def inherit(shared: Any, own: Any) -> Any:
    """`own` completed from `shared`, key by key; `own` alone when the two are different things."""
    if own is None:
        return shared
    if isinstance(own, str) and isinstance(shared, dict) and shared.get("type") == own:
        return shared
    if not (isinstance(own, dict) and isinstance(shared, dict)) or are_different(shared, own):
        return own
    return {
        **own,
        **{key: inherit(value, own[key]) if key in own else value for key, value in shared.items()},
    }


def are_different(shared: dict[str, Any], own: dict[str, Any]) -> bool:
    """True when both tables say what they are (`type`, or a task set's `id`) and disagree."""
    return any(_tag(shared, *path) != _tag(own, *path) for path in _TAGS if _tag(own, *path))


_TAGS = (("type",), ("taskset", "id"))


def _tag(table: Any, *path: str) -> Any:
    for key in path:
        table = table.get(key) if isinstance(table, dict) else None
    return table


class OrchestratorConfig(BaseConfig):
    """The orchestrator: tasks, episodes, groups, advantages, batches."""

    former = former_keys.ORCHESTRATOR

    train: TrainSourcesConfig
    """What is trained on."""
    eval: EvalSourcesConfig | None = None
    """What is evaluated; None: nothing."""
    batch_size: int = Field(128, ge=1)
    """Episodes per step; a multiple of every source's group_size."""
    constant_batch_size: bool = True
    """Backfill episodes that carry no signal, so that every batch has `batch_size` live ones."""
    concurrency: ConcurrencyConfig = defaults()
    """Episodes in flight."""
    dispatch_per_minute: int | None = Field(None, ge=1)
    """Most episodes started per minute, evenly spread; None: as many as run at once."""
    max_off_policy_steps: int = Field(8, ge=0)
    """Largest staleness a shipped episode may have, in steps."""
    target_lag: int = Field(1, ge=0)
    """Batch n ships once version n - 1 - target_lag is published; 0 is synchronous training."""
    max_empty_batches: int = Field(10, ge=1)
    """Rounds of groups without any signal after which the run fails with the reason."""
    episode_timeout_s: float = Field(600.0, gt=0)
    """Seconds after which an episode is a time-out."""
    env_workers: int = Field(1, ge=1)
    """Processes per environment server."""
    batch_transport: Literal["zmq", "filesystem"] = "zmq"
    """How batches reach the trainer."""
    save_episodes: bool = True
    """Write every episode to the trace stream."""

    @model_validator(mode="after")
    def _sources_fit(self) -> OrchestratorConfig:
        for block in (self.train, self.eval):
            if block is None:
                continue
            labels = [source.label for source in block.source]
            for label in labels:
                if label in RESERVED_SOURCE_NAMES:
                    raise ValueError(f"source name {label!r} is reserved; choose another `name`")
                if labels.count(label) > 1:
                    raise ValueError(f"source name {label!r} occurs twice; set a unique `name`")
        for source in self.train.source:
            if self.batch_size % source.group_size:
                raise ValueError(
                    f"batch_size {self.batch_size} is not a multiple of group_size "
                    f"{source.group_size} of source {source.label!r}"
                )
            for name in ("initial_inflight", "max_inflight"):
                bound = getattr(self.concurrency, name)
                if bound is not None and source.group_size > bound:
                    raise ValueError(
                        f"concurrency.{name} {bound} is below group_size {source.group_size} of "
                        f"source {source.label!r}"
                    )
            if source.sampling.temperature == 0:
                raise ValueError(f"source {source.label!r}: temperature 0 cannot be trained on")
        return self
