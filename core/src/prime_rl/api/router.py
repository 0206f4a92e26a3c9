"""The router contract: chooses an engine for a session."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from prime_rl.api.plugin import Plugin

SESSION_HEADER = "X-Session-ID"
"""Requests that carry the same value belong to one session."""


class Router(Plugin):
    """A reverse proxy in front of the engines.

    Capabilities it declares: routed_experts, sampling_mask, streaming.
    """

    @abstractmethod
    def application(self, engine_urls: Sequence[str]) -> Any:
        """An ASGI application that forwards every path to an engine.

        It also answers `GET /health`, `GET /workers` and `POST /finish_session?session_id=S`
        (idempotent) itself. Admin calls (pause, resume, update_weights) never pass through it.
        """
