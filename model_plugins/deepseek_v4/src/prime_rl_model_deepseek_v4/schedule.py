"""Which layer has which attention and which experts, in both spellings of config.json."""

from __future__ import annotations

from typing import Any

from prime_rl.api.config_json import ConfigJson
from prime_rl.errors import ConfigError

HASH_MOE = "hash_moe"
SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
"""transformers' names of the attentions."""
KINDS = {SLIDING: "sliding", CSA: "csa", HCA: "hca"}
RELEASED_RATES = {CSA: 4, HCA: 128}
_BY_RATIO = {0: SLIDING, 4: CSA, 128: HCA}


def read_layers(keys: ConfigJson, layers: int) -> list[tuple[Any, int]]:
    """(kind, ratio) of every layer, from `layer_types` with `compress_rates`, or from
    `compress_ratios`, whose entries beyond the layers belong to draft layers.

    Neither has a default: transformers' own one is no released model.
    """
    ratios = keys.sequence("compress_ratios", default=None)
    if ratios is not None and len(ratios) < layers:
        raise ConfigError(
            f"config.json: compress_ratios: found {len(ratios)} entries, expected one for each of "
            f"the {layers} layers"
        )
    types = keys.sequence("layer_types", default=None)
    if types is None:
        if ratios is None:
            raise ConfigError("config.json: compress_ratios is missing")
        types = [_type_of(ratio) for ratio in ratios[:layers]]
    _check("layer_types", types, layers, KINDS)
    rates = _read_rates(keys)
    found = [(KINDS[name], rates.get(name, 0)) for name in types]
    if ratios is not None and [ratio or 0 for ratio in ratios[:layers]] != [r for _, r in found]:
        raise ConfigError(
            f"config.json: compress_ratios: found {list(ratios[:layers])}, expected "
            f"{[ratio for _, ratio in found]} as layer_types and compress_rates say"
        )
    return found


def read_mlp_types(keys: ConfigJson, layers: int) -> list[str]:
    """`mlp_layer_types`, or hash experts in the first `num_hash_layers`."""
    types = keys.sequence("mlp_layer_types", default=None)
    if types is None:
        hashed = keys.integer("num_hash_layers", minimum=0)
        return [HASH_MOE if layer < hashed else "moe" for layer in range(layers)]
    _check("mlp_layer_types", types, layers, (HASH_MOE, "moe"))
    return list(types)


def _read_rates(keys: ConfigJson) -> dict[str, int]:
    table = keys.table("compress_rates") or ConfigJson({})
    return {
        name: table.integer(name, default=released, minimum=2)
        for name, released in RELEASED_RATES.items()
    }


def _type_of(ratio: Any) -> str:
    if (ratio or 0) not in _BY_RATIO:
        raise ConfigError(
            f"config.json: compress_ratios: found {ratio!r}, expected 0, 4 or 128; write other "
            "ratios as layer_types and compress_rates"
        )
    return _BY_RATIO[ratio or 0]


def _check(key: str, types: Any, layers: int, known: Any) -> None:
    if len(types) != layers:
        raise ConfigError(f"config.json: {key}: found {len(types)} entries, expected {layers}")
    unknown = sorted({str(name) for name in types} - set(known))
    if unknown:
        raise ConfigError(f"config.json: {key}: found {unknown}, expected only {list(known)}")
