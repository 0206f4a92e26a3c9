"""The plugin's options."""

from __future__ import annotations

from typing import Literal

from prime_rl.configs.base import PluginConfig


class Qwen38Config(PluginConfig):
    """What a run may choose about the model."""

    type: Literal["qwen3_8"] = "qwen3_8"
    table_trainable: bool = True
    """Train the n-gram table. False: it keeps its values and needs no optimizer state."""
    table_on_cpu: bool = False
    """Keep the n-gram table in host memory; only the rows that are looked up travel."""
