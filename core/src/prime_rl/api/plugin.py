"""The base of every contract: a light object with a config and declared capabilities."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from prime_rl.configs.base import PluginConfig

Capabilities = Mapping[str, Any]
"""Capability name -> value. The resolver compares what one plugin needs with what another has."""


class Plugin:
    """What an entry point names. Importing and constructing it must not load torch or a device.

    Subclass one contract of `prime_rl.api`, set `Config` to a pydantic class derived from
    `PluginConfig`, and import heavy libraries inside the methods that need them.
    """

    Config: ClassVar[type[PluginConfig]] = PluginConfig
    capabilities: ClassVar[Capabilities] = {}
    """What this plugin can do, e.g. {"devices": ("cpu", "cuda"), "routed_experts": True}."""
    needs: ClassVar[Capabilities] = {}
    """`{"<kind>.<capability>": value}` that other choices of the run must offer."""

    def __init__(self, config: PluginConfig) -> None:
        if not isinstance(config, self.Config):
            raise TypeError(
                f"{type(self).__name__} takes a {self.Config.__name__}, "
                f"found {type(config).__name__}"
            )
        self.config: Any = config
