"""config.json of an export: what was read, with the keys that a server needs."""

from __future__ import annotations

from typing import Any

from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture

QUANTISATION_KEYS = ("quantization_config", "expert_dtype")
"""Describe the quantised release; an export's tensors are not quantised."""


def export_config(config: dict[str, Any], architecture: DeepseekV4Architecture) -> dict[str, Any]:
    """The original keys stay as they were; missing ones are made from the architecture.

    Servers know only the original keys, transformers reads and then drops them.
    """
    exported = {key: value for key, value in config.items() if key not in QUANTISATION_KEYS}
    drafts = exported.get("num_nextn_predict_layers") or 0
    made = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "compress_ratios": [layer.ratio for layer in architecture.layers] + [0] * drafts,
        "qk_rope_head_dim": architecture.rotary_dim,
        "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus",
        "norm_topk_prob": True,
        "n_shared_experts": 1,
        "num_key_value_heads": 1,
    }
    leading = len(architecture.hash_layers)
    if architecture.hash_layers == tuple(range(leading)):
        made["num_hash_layers"] = leading
    nested = (config.get("rope_parameters") or {}).get("compress")
    if nested is not None:
        made |= _original_rope(config, nested)
    for key, value in made.items():
        if exported.get(key) is None:
            exported[key] = value
    return exported


def _original_rope(config: dict[str, Any], compress: dict[str, Any]) -> dict[str, Any]:
    """`rope_scaling` and both bases from transformers' nested tables."""
    main = config["rope_parameters"].get("main") or {}
    dropped = ("rope_theta", "partial_rotary_factor", "attention_factor")
    scaling = {key: value for key, value in compress.items() if key not in dropped}
    made: dict[str, Any] = {}
    if scaling.get("rope_type", "default") != "default":
        made["rope_scaling"] = {"type": scaling["rope_type"], **scaling}
    for key, table in (("rope_theta", main), ("compress_rope_theta", compress)):
        if "rope_theta" in table:
            made[key] = table["rope_theta"]
    return made
