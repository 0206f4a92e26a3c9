"""config.json of an export: what is true of the tensors written, readable by every server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prime_rl_model_qwen3_8.architecture import LINEAR, Qwen38Architecture, text_config

_QUANTISED_KEYS = ("quantization_config", "ple_embedding_dtype")


def exported_config(config: Mapping[str, Any], architecture: Qwen38Architecture) -> dict[str, Any]:
    """The config that was read, with three things set right.

    Tensors are written unquantised, so nothing may announce FP8. vLLM reads one end-of-text token,
    not a list, and knows the layer types by their released names. The number of table parts stands
    in the language model's own table.
    """
    exported = _without(config, _QUANTISED_KEYS)
    inner = text_config(config)
    text = _without(inner, _QUANTISED_KEYS)
    text["layer_types"] = [
        "full_attention" if layer in architecture.sparse_layers else LINEAR
        for layer in range(architecture.num_layers)
    ]
    if architecture.tables:
        text["eos_token_id"] = architecture.tables[0].eos_token
        text["split_ngram_parts"] = architecture.tables[0].parts
    if inner is config:
        return text
    exported.pop("split_ngram_parts", None)
    exported["text_config"] = text
    return exported


def _without(values: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key not in keys}
