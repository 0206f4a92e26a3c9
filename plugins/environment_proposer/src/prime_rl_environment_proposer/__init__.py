"""One agent invents words, others turn them round: proposer and solvers in one episode, offline."""

from __future__ import annotations

from typing import Any

__all__ = ["InProcessHarness", "ProposerEnv", "ProposerTaskset", "sft_rows"]

_HOMES = {
    "InProcessHarness": "prime_rl.api.environment",
    "ProposerEnv": "prime_rl_environment_proposer.environment",
    "ProposerTaskset": "prime_rl_environment_proposer.taskset",
    "sft_rows": "prime_rl_environment_proposer.rows",
}
"""Where each public name lives; imported on first use, so that importing the package is light."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
