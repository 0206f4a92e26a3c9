"""The plugin's options."""

from __future__ import annotations

from typing import Literal

from prime_rl.configs.base import PluginConfig


class Qwen3Config(PluginConfig):
    """Nothing to set for the dense model."""

    type: Literal["qwen3"] = "qwen3"


class Qwen3MoEConfig(PluginConfig):
    """Nothing to set for the mixture-of-experts model."""

    type: Literal["qwen3_moe"] = "qwen3_moe"
