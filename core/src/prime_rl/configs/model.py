"""Sections that describe the model, its numerics and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from prime_rl.configs import former_keys
from prime_rl.configs.base import BaseConfig, defaults, plugin_section


class FreshModelConfig(BaseConfig):
    """A model with random weights, made in the run directory before the first stage."""

    architecture: dict[str, Any]
    """Keys of the checkpoint's config.json, `model_type` included. `vocab_size` is taken from the
    tokenizer when it is left out."""
    seed: int = Field(0, ge=0)
    """Seed of the random weights."""
    tokenizer: Literal["bytes", "letters"] = "bytes"
    """Tokenizer built beside the weights: all bytes, or lower-case letters and little else."""


class LayerBackendConfig(BaseConfig):
    """A back end for some layers only."""

    layers: list[int] = Field(min_length=1)
    """Global layer numbers, from 0."""
    backend: plugin_section("moe_backend", default="torch") = defaults()  # type: ignore[valid-type]
    """MoE back end of these layers."""


class MoEConfig(BaseConfig):
    """How mixture-of-experts layers are computed."""

    former = former_keys.MOE

    backend: plugin_section("moe_backend", default="torch") = defaults()  # type: ignore[valid-type]
    """MoE back end of every layer that `layers` does not name."""
    layers: list[LayerBackendConfig] = []
    """Exceptions by layer."""
    freeze_router: bool | Literal["auto"] = "auto"
    """Keep router weights fixed. auto: true in RL, false in SFT."""
    router_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of router weights and scores. auto: float32 in RL; in SFT the compute dtype."""


class ModelConfig(BaseConfig):
    """Which model is trained and served, and in which precision."""

    former = former_keys.MODEL

    name: str | None = None
    """Directory with a Hugging Face checkpoint. None: `fresh`, or the previous stage's result."""
    fresh: FreshModelConfig | None = None
    """Make a small model with random weights instead of loading one."""
    plugin: str | None = None
    """Model plugin to use; None: the one that lists the checkpoint's `model_type`."""
    attention: plugin_section("attention_backend", default="torch") = defaults()  # type: ignore[valid-type]
    """Attention back end."""
    dsa_backend: plugin_section("dsa_backend", default="torch") = defaults()  # type: ignore[valid-type]
    """Back end of sparse attention: index scores, top-k, attention over the chosen keys."""
    moe: MoEConfig = defaults()
    """Mixture-of-experts settings."""
    options: dict[str, Any] = {}
    """The model plugin's own options, validated by its `Config`."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of forward and backward. auto: bfloat16 on an accelerator, float32 on a CPU."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradient reduction over ranks."""
    trust_remote_code: bool = False
    """Allow code shipped with the tokenizer to run."""


class TokenizerConfig(BaseConfig):
    """Tokenizer and renderer."""

    former = former_keys.TOKENIZER

    name: str | None = None
    """Directory of the tokenizer; None: the model's directory."""
    renderer: str = "auto"
    """Name of the renderer that turns messages into tokens; auto: the one the model plugin names."""


class CheckpointConfig(BaseConfig):
    """When trainer and orchestrator state is saved and what is kept."""

    former = former_keys.CHECKPOINT

    interval: int | None = Field(None, ge=1)
    """Steps between checkpoints; None: only the final one."""
    keep_last: int | None = Field(None, ge=1)
    """Newest checkpoints to keep; None with keep_interval None: keep all."""
    keep_interval: int | None = Field(None, ge=1)
    """Also keep every checkpoint whose step is a multiple of this."""


class ResumeConfig(BaseConfig):
    """Continue an earlier run."""

    step: int | None = Field(None, ge=1)
    """Step to continue after; None: the newest complete checkpoint."""
    dir: Path | None = None
    """A `step_<N>` checkpoint directory of another run to fork from; excludes `step`."""
    skip_optimizer: bool = False
    """Load weights but start the optimizer afresh."""
    skip_scheduler: bool = False
    """Start the learning-rate schedule afresh."""
    skip_dataloader: bool = False
    """Start the data order afresh."""
