"""The embedded engine: serves a model with the model plugin's own module. Needs no accelerator."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from prime_rl.api.engine import Engine, EngineSpec
from prime_rl.configs.base import PluginConfig


class EmbeddedConfig(PluginConfig):
    """Settings of the embedded engine."""

    type: Literal["embedded"] = "embedded"
    max_running: int = Field(64, ge=1)
    """Most sequences that generate at the same time."""
    max_queue: int = Field(4096, ge=0)
    """Most requests that wait; beyond that the answer is 503."""
    max_batch_tokens: int = Field(8192, ge=2)
    """Most tokens of one forward; longer prompts are taken in parts where there is a decode cache."""
    use_decode_cache: bool | Literal["auto"] = "auto"
    """Use the model plugin's decode cache. auto: when it has one; otherwise, and with false, every
    step is one packed forward over all running sequences."""
    max_body_mib: int = Field(64, ge=1)
    """Largest request body."""

    @model_validator(mode="after")
    def _every_sequence_steps(self) -> EmbeddedConfig:
        if self.max_batch_tokens <= self.max_running:
            raise ValueError(
                f"max_batch_tokens is {self.max_batch_tokens}, expected more than max_running "
                f"({self.max_running}): every running sequence takes one token per step"
            )
        return self


class EmbeddedEngine(Engine):
    """Zero mismatch with the trainer by construction: both run the same module."""

    Config = EmbeddedConfig
    capabilities = {
        "devices": ("cpu", "cuda"),
        "routed_experts": True,
        "sampling_mask": True,
        "prompt_logprobs": True,
        "lora": False,
    }

    def serve(self, spec: EngineSpec) -> None:
        """As `Engine.serve`. Raises RunError when the engine fails while serving."""
        from prime_rl.inference.serve import serve

        serve(self.config, spec)
