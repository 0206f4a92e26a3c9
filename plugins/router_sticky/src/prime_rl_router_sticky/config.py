"""Settings of the sticky router."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from prime_rl.configs.base import PluginConfig


class StickyConfig(PluginConfig):
    """How sessions are placed and engines watched."""

    type: Literal["sticky"] = "sticky"
    session_idle_s: float = Field(7200.0, gt=0)
    """A session without requests for this long is forgotten."""
    max_sessions: int = Field(100_000, ge=1)
    """Most sessions remembered; beyond that the one unused for longest is forgotten."""
    health_interval_s: float = Field(2.0, gt=0)
    """Seconds between health checks of an engine."""
    health_timeout_s: float = Field(5.0, gt=0)
    """An engine that takes longer to answer a health check counts as failing."""
    health_failures: int = Field(2, ge=1)
    """Failed checks in a row after which an engine gets no more requests. A refused connection
    counts at once."""
    connect_timeout_s: float = Field(5.0, gt=0)
    """Seconds until an engine that does not accept a connection counts as down."""
    max_body_mib: int = Field(512, ge=1)
    """Largest request body."""
