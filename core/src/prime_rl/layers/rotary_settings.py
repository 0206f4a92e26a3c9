"""Rotary frequencies read from config.json: plain, linear and YaRN. D is the rotary dimension."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError


@dataclass(frozen=True)
class RotarySettings:
    """The frequencies of one rope. Computed in float64, so no module and no device is involved."""

    inverse_frequencies: tuple[float, ...]
    """D/2 angles per position, in radians."""
    scale: float = 1.0
    """Factor on cosine and sine (YaRN's attention factor)."""


def read_rotary(config: ConfigJson, dim: int, theta_default: float = 10000.0) -> RotarySettings:
    """Frequencies from `rope_parameters`, or the older `rope_theta` and `rope_scaling`.

    Knows default, linear and yarn; ConfigError for other types.
    """
    table = config.table("rope_parameters") or config.table("rope_scaling") or ConfigJson({})
    theta = table.number("rope_theta", default=None)
    if theta is None:
        theta = config.number("rope_theta", default=theta_default)
    kind = table.text("rope_type", "type", default="default")
    plain = plain_frequencies(dim, theta)
    if kind == "default":
        return RotarySettings(plain)
    if kind == "linear":
        factor = table.number("factor")
        return RotarySettings(tuple(frequency / factor for frequency in plain))
    if kind == "yarn":
        original = table.number("original_max_position_embeddings", default=None)
        if original is None:
            original = config.number("max_position_embeddings")
        return yarn(
            dim,
            theta,
            factor=table.number("factor"),
            original_length=original,
            beta_fast=table.number("beta_fast", default=32.0),
            beta_slow=table.number("beta_slow", default=1.0),
            truncate=table.boolean("truncate", default=True),
            attention_factor=table.number("attention_factor", default=None),
            mscale=table.number("mscale", default=None),
            mscale_all_dim=table.number("mscale_all_dim", default=None),
        )
    raise ConfigError(
        f"config.json: {table.path}rope_type: found {kind!r}, expected 'default', 'linear' or "
        "'yarn'; other kinds are not implemented"
    )


def plain_frequencies(dim: int, theta: float) -> tuple[float, ...]:
    """theta^(-2i/D)."""
    return tuple(theta ** (-2 * index / dim) for index in range(dim // 2))


def yarn(
    dim: int,
    theta: float,
    *,
    factor: float,
    original_length: float,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
    attention_factor: float | None,
    mscale: float | None,
    mscale_all_dim: float | None,
) -> RotarySettings:
    """YaRN: low frequencies divided by `factor`, high ones kept, a ramp between.

    The ramp's ends are the dimensions that turn `beta_fast` and `beta_slow` times within the
    original context; they depend on nothing the run sets, and are limited to D - 1, not D/2 - 1.
    """

    def turning(rotations: float) -> float:
        return dim * math.log(original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = turning(beta_fast), turning(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001
    frequencies = []
    for index, plain in enumerate(plain_frequencies(dim, theta)):
        stretched = min(max((index - low) / width, 0.0), 1.0)
        frequencies.append(plain / factor * stretched + plain * (1 - stretched))
    return RotarySettings(
        tuple(frequencies), _yarn_scale(factor, attention_factor, mscale, mscale_all_dim)
    )


def _yarn_scale(
    factor: float, given: float | None, mscale: float | None, mscale_all_dim: float | None
) -> float:
    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if given is not None:
        return given
    if mscale and mscale_all_dim:
        return growth(mscale) / growth(mscale_all_dim)
    return growth(1.0)
