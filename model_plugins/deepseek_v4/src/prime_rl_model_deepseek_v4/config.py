"""The plugin's options."""

from __future__ import annotations

from typing import Literal

from prime_rl.configs.base import PluginConfig


class DeepseekV4Config(PluginConfig):
    """Nothing to set."""

    type: Literal["deepseek_v4"] = "deepseek_v4"
