"""Sticky least-loaded router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prime_rl.api import Router
from prime_rl_router_sticky.config import StickyConfig


class Sticky(Router):
    """A session stays on one engine; a new one goes where the fewest sessions are."""

    Config = StickyConfig
    capabilities = {"routed_experts": True, "sampling_mask": True, "streaming": True}

    def application(self, engine_urls: Sequence[str]) -> Any:
        """As `Router.application`."""
        from prime_rl_router_sticky.application import StickyApplication

        return StickyApplication(self.config, engine_urls)
