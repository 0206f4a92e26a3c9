"""The kinds of the layers, in every spelling that config.json files use."""

from __future__ import annotations

from typing import Any, Literal

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError

LayerKind = Literal["mamba", "attention", "moe", "mlp"]

SYMBOLS: dict[str, LayerKind] = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}
"""Letters of `hybrid_override_pattern`."""
NAMES: dict[str, LayerKind] = {
    "mamba": "mamba",
    "linear_attention": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "moe": "moe",
    "mlp": "mlp",
}
"""Words of `layers_block_type`, older and newer."""


def read_pattern(keys: ConfigJson) -> tuple[LayerKind, ...]:
    """The kind of every layer. Raises ConfigError when spellings are missing or disagree."""
    symbols = keys.text("hybrid_override_pattern", default=None)
    words = keys.sequence("layers_block_type", "layer_types", default=None)
    found: dict[str, tuple[LayerKind, ...]] = {}
    if symbols is not None:
        found["hybrid_override_pattern"] = _named("hybrid_override_pattern", symbols, SYMBOLS)
    if words is not None:
        found["layers_block_type"] = _named("layers_block_type", words, NAMES)
    if not found:
        raise ConfigError(
            "config.json: hybrid_override_pattern is missing, and layers_block_type, too; "
            "expected one of them"
        )
    if len(set(found.values())) > 1:
        raise ConfigError(
            "config.json: hybrid_override_pattern and layers_block_type describe different layers"
        )
    kinds = next(iter(found.values()))
    stated = keys.integer("num_hidden_layers", default=len(kinds))
    if stated != len(kinds):
        raise ConfigError(
            f"config.json: num_hidden_layers: found {stated}, expected {len(kinds)}, the number of "
            f"layers in {next(iter(found))}"
        )
    return kinds


def _named(key: str, items: Any, table: dict[str, LayerKind]) -> tuple[LayerKind, ...]:
    unknown = sorted({repr(item) for item in items if item not in table})
    if unknown or not items:
        raise ConfigError(
            f"config.json: {key}: found {', '.join(unknown) or 'nothing'}, expected only "
            f"{', '.join(map(repr, table))}"
        )
    return tuple(table[item] for item in items)
