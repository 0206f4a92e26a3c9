"""Which layers choose their own keys, and which use those of the layer before."""

from __future__ import annotations

from collections.abc import Mapping

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError

LETTERS: Mapping[str, str] = {"F": "full", "S": "shared"}
DEFAULT_OFFSET = 2
"""`index_skip_topk_offset` where config.json has only a frequency."""


def read_full_layers(keys: ConfigJson, layers: int) -> tuple[int, ...]:
    """Global numbers of the layers with an indexer; every other layer reuses the last such one's
    keys.

    Read from `indexer_types`, `index_topk_pattern`, or `index_topk_freq` with
    `index_skip_topk_offset`; without any of them every layer has an indexer. Raises ConfigError
    when two of them disagree: the trainer and the server would select different keys.
    """
    found = {
        key: types
        for key, types in (
            ("indexer_types", _listed(keys, layers)),
            ("index_topk_pattern", _pattern(keys, layers)),
            ("index_topk_freq", _regular(keys, layers)),
        )
        if types is not None
    }
    if not found:
        return tuple(range(layers))
    name, types = next(iter(found.items()))
    for other, other_types in found.items():
        if other_types != types:
            layer = next(i for i in range(layers) if types[i] != other_types[i])
            raise ConfigError(
                f"config.json: {name} makes layer {layer} {types[layer]!r} and {other} makes it "
                f"{other_types[layer]!r}; expected the same schedule, since servers read one and "
                "trainers the other"
            )
    if types[0] != "full":
        raise ConfigError(
            f"config.json: {name}: layer 0 is 'shared', expected 'full': there is no layer before "
            "it whose keys it could use"
        )
    return tuple(layer for layer, kind in enumerate(types) if kind == "full")


def pattern_of(full_layers: tuple[int, ...], layers: int) -> str:
    """One letter a layer, as servers read it: `FFFSSSF...`."""
    return "".join("F" if layer in full_layers else "S" for layer in range(layers))


def _listed(keys: ConfigJson, layers: int) -> tuple[str, ...] | None:
    types = keys.sequence("indexer_types", default=None)
    return None if types is None else _checked("indexer_types", types, layers)


def _pattern(keys: ConfigJson, layers: int) -> tuple[str, ...] | None:
    raw = keys.values.get("index_topk_pattern")
    if raw is None:
        return None
    if not isinstance(raw, str | list | tuple):
        raise ConfigError(
            f"config.json: index_topk_pattern: found {raw!r}, expected letters F and S"
        )
    return _checked("index_topk_pattern", tuple(LETTERS.get(kind, kind) for kind in raw), layers)


def _regular(keys: ConfigJson, layers: int) -> tuple[str, ...] | None:
    """Full in layers 0 to offset - 1, then every `freq`th."""
    frequency = keys.integer("index_topk_freq", default=None)
    if frequency is None:
        return None
    offset = keys.integer("index_skip_topk_offset", default=DEFAULT_OFFSET, minimum=0)
    return tuple(
        "shared" if max(layer - offset + 1, 0) % frequency else "full" for layer in range(layers)
    )


def _checked(key: str, types: tuple[object, ...], layers: int) -> tuple[str, ...]:
    wrong = sorted({repr(kind) for kind in types} - {"'full'", "'shared'"})
    if wrong:
        raise ConfigError(
            f"config.json: {key}: found {', '.join(wrong)}, expected full (F) or shared (S)"
        )
    if len(types) != layers:
        raise ConfigError(
            f"config.json: {key}: found {len(types)} layers, expected {layers} (num_hidden_layers)"
        )
    return tuple(str(kind) for kind in types)
