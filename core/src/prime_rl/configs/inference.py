"""The `[inference]` and `[router]` sections: engines and who chooses among them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prime_rl.configs import former_keys
from prime_rl.configs.base import BaseConfig, defaults, plugin_section
from prime_rl.configs.urls import BaseUrl


class InferenceConfig(BaseConfig):
    """The engines that generate."""

    former = former_keys.INFERENCE

    engine: plugin_section("engine", default="embedded") = defaults()  # type: ignore[valid-type]
    """Engine plugin and its settings."""
    replicas: int = Field(1, ge=1)
    """Engines to start."""
    host: str = "127.0.0.1"
    """Address the engines bind. Anything but loopback is reachable by others: engines have no
    authentication."""
    port: int = Field(0, ge=0, le=65535)
    """First engine's port; 0: chosen by the system. Engine k gets port + k."""
    base_url: BaseUrl | None = None
    """Use engines or a router that already run here instead of starting any."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where engines run. auto: cuda when there is one."""
    threads: int = Field(1, ge=1)
    """CPU threads per engine for torch."""
    max_model_len: int | None = Field(None, ge=2)
    """Most tokens of prompt and completion; None: the run's seq_len."""
    return_routed_experts: bool | Literal["auto"] = "auto"
    """Return each token's experts. auto: when the trainer replays routing."""
