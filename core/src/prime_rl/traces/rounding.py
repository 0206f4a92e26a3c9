"""Rounding of numbers that are stored for people to look at. Training never reads them back."""

from __future__ import annotations

import math
from collections.abc import Sequence

SIGNIFICANT_DIGITS = 6


def round_stream(values: Sequence[float | bool | None]) -> list[float | int | bool | None]:
    """Floats to six significant digits; null, booleans and integers stay; NaN becomes null."""
    return [_round(value) if type(value) is float else value for value in values]


def _round(value: float) -> float | None:
    if not math.isfinite(value):
        return None
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
