"""The `[trainer]` section: optimisation, memory, parallel layout, loss."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from prime_rl.configs import former_keys
from prime_rl.configs.base import BaseConfig, default_type, defaults, plugin_section


class AdamWConfig(BaseConfig):
    """AdamW."""

    former = former_keys.ADAMW

    type: Literal["adamw"] = "adamw"
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float | Literal["auto"] = "auto"
    """Decoupled weight decay. auto: 0.0 in RL, 0.01 in SFT."""
    betas1: float = Field(0.9, ge=0, lt=1)
    """Decay of the first moment."""
    betas2: float = Field(0.999, ge=0, lt=1)
    """Decay of the second moment."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator."""
    max_norm: float | None = Field(1.0, gt=0)
    """Global gradient-norm bound; None: no clipping."""


class SignSGDConfig(BaseConfig):
    """Sign SGD: w -= lr * wd * w; w -= lr * sign(g). No state."""

    type: Literal["sign_sgd"] = "sign_sgd"
    lr: float = Field(1e-6, gt=0)
    """Peak learning rate."""
    weight_decay: float | Literal["auto"] = "auto"
    """Decoupled weight decay. auto: 0.0 in RL, 0.01 in SFT."""
    max_norm: float | None = Field(1.0, gt=0)
    """Global gradient-norm bound; None: no clipping."""


OptimConfig = Annotated[
    AdamWConfig | SignSGDConfig, Field(discriminator="type"), default_type("adamw")
]


class ConstantScheduleConfig(BaseConfig):
    """Learning rate stays at its peak after the warm-up."""

    type: Literal["constant"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up."""


class LinearScheduleConfig(BaseConfig):
    """Warm-up, constant, then linear decay over the last `decay_steps` steps."""

    type: Literal["linear"] = "linear"
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up."""
    decay_steps: int = Field(10, ge=0)
    """Steps of linear decay at the end; needs max_steps."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at both ends."""


class CosineScheduleConfig(BaseConfig):
    """Warm-up, then a half cosine over the remaining steps."""

    type: Literal["cosine"] = "cosine"
    warmup_steps: int = Field(10, ge=0)
    """Steps of linear warm-up."""
    min_lr: float = Field(0.0, ge=0)
    """Learning rate at the end."""


ScheduleConfig = Annotated[
    ConstantScheduleConfig | LinearScheduleConfig | CosineScheduleConfig,
    Field(discriminator="type"),
    default_type("constant"),
]


class ParallelConfig(BaseConfig):
    """How ranks divide the work. world = dp_replicate * dp_shard."""

    ranks: int = Field(1, ge=1)
    """Trainer processes the local launcher starts on this machine."""
    dp_replicate: int = Field(1, ge=1)
    """Replicas of the sharded model (HSDP)."""
    expert_parallel: int = Field(1, ge=1)
    """Neighbouring ranks that divide the experts of every layer between them; tokens travel. It
    divides ranks / dp_replicate and the number of experts."""
    reshard_after_forward: bool = True
    """Free gathered parameters after each block's forward."""
    timeout_s: float = Field(900.0, gt=0)
    """Seconds before a collective gives up."""


class MemoryConfig(BaseConfig):
    """What is traded for memory."""

    activation_checkpointing: Literal["none", "full"] = "none"
    """Recompute every block's activations in backward."""
    logprob_chunk_tokens: int = Field(1024, ge=1)
    """Tokens whose logits exist at one time."""
    compile: bool = False
    """torch.compile each block."""


class TrainerConfig(BaseConfig):
    """The trainer: forward, loss, backward, step, checkpoint, publish."""

    former = former_keys.TRAINER

    loss: plugin_section("loss", default="ipo") = defaults()  # type: ignore[valid-type]
    """The rl component of the loss."""
    optim: OptimConfig = defaults()
    """Optimizer."""
    schedule: ScheduleConfig = defaults()
    """Learning-rate schedule."""
    parallel: ParallelConfig = defaults()
    """Ranks and shards."""
    memory: MemoryConfig = defaults()
    """Memory against speed."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the trainer runs. auto: cuda when there is one."""
    threads: int | None = Field(None, ge=1)
    """CPU threads per rank for torch; None: 1 on a CPU."""
    matmul_precision: Literal["highest", "high", "medium"] = "high"
    """torch.set_float32_matmul_precision."""
    gc_interval: int | None = Field(50, ge=1)
    """Steps between collections of Python's garbage, on all ranks together; None: leave it to
    Python."""
    background_batches: int = Field(1, ge=0)
    """Micro-batches converted to tensors ahead of the one in work."""
    enable_router_replay: bool = False
    """Route tokens as the engine did; needs an engine that returns routed experts."""

    @model_validator(mode="after")
    def _replicas_divide_ranks(self) -> TrainerConfig:
        if self.parallel.ranks % self.parallel.dp_replicate:
            raise ValueError(
                f"parallel.dp_replicate {self.parallel.dp_replicate} does not divide "
                f"parallel.ranks {self.parallel.ranks}"
            )
        shards = self.parallel.ranks // self.parallel.dp_replicate
        if shards % self.parallel.expert_parallel:
            raise ValueError(
                f"parallel.expert_parallel {self.parallel.expert_parallel} does not divide the "
                f"{shards} ranks that hold one model (parallel.ranks / parallel.dp_replicate)"
            )
        return self
