"""The engine contract: a process that serves the model over HTTP."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from prime_rl.api.plugin import Plugin


@dataclass(frozen=True)
class EngineSpec:
    """Everything an engine process is started with."""

    model_dir: Path
    """Hugging Face checkpoint: config.json, tokenizer, weights."""
    served_name: str
    host: str
    port: int
    """0: the system chooses; the engine writes its URL to `url_file` once it answers /health."""
    url_file: Path
    device: Literal["cpu", "cuda"]
    threads: int
    max_model_len: int
    compute_dtype: Literal["float32", "bfloat16"]
    index: int
    """This engine's number among `count`."""
    count: int
    seed: int
    return_routed_experts: bool
    return_sampling_mask: bool
    model_plugin: str
    """Qualified name of the model plugin, for engines that run it."""
    model_section: Any
    """The run's ModelConfig."""
    weight_transport: Any
    """The run's weight transport section (None: weights never change)."""


class Engine(Plugin):
    """Serves `/inference/v1/generate`, `/v1/chat/completions`, `/v1/completions`, `/v1/models`,
    `/health`, `/metrics`, `/pause`, `/resume` and `/update_weights`.

    Capabilities it declares: devices, routed_experts, sampling_mask, lora.
    """

    @abstractmethod
    def serve(self, spec: EngineSpec) -> None:
        """Run the server in this process until it is told to end."""
