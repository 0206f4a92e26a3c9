"""The plugin's options."""

from __future__ import annotations

from typing import Literal

from prime_rl.configs.base import PluginConfig


class Glm5Config(PluginConfig):
    """Nothing to set."""

    type: Literal["glm5"] = "glm5"
