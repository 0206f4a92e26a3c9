"""The plugin's options."""

from __future__ import annotations

from typing import Literal

from prime_rl.configs.base import PluginConfig


class NemotronHConfig(PluginConfig):
    """Nothing to set."""

    type: Literal["nemotron_h"] = "nemotron_h"
