"""Sums worked out with a calculator: several turns with a tool, offline."""

from __future__ import annotations

from typing import Any

__all__ = ["CalculatorEnv", "CalculatorTaskset", "InProcessHarness", "sft_rows"]

_HOMES = {
    "CalculatorEnv": "prime_rl_environment_calculator.environment",
    "CalculatorTaskset": "prime_rl_environment_calculator.taskset",
    "InProcessHarness": "prime_rl.api.environment",
    "sft_rows": "prime_rl_environment_calculator.rows",
}
"""Where each public name lives; imported on first use, so that importing the package is light."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
