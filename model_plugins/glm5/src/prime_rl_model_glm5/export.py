"""config.json of an export: what transformers and vLLM need to compute the same as the trainer."""

from __future__ import annotations

from typing import Any

from prime_rl_model_glm5.architecture import Glm5Architecture
from prime_rl_model_glm5.schedule import pattern_of


def served_config(config: dict[str, Any], architecture: Glm5Architecture) -> dict[str, Any]:
    """The config as read, with the keys whose absence makes vLLM compute something else.

    Without them vLLM rotates the indexer by halves, routes by softmax without bias and gives every
    layer an indexer; transformers reads `indexer_types`. Keys that say the same stay. Weights are
    written unquantised, so `quantization_config` goes.
    """
    exported = {key: value for key, value in config.items() if key != "quantization_config"}
    exported["indexer_rope_interleave"] = True
    exported["scoring_func"] = "sigmoid"
    exported["topk_method"] = "noaux_tc"
    full, layers = architecture.indexing.full_layers, architecture.num_layers
    pattern = pattern_of(full, layers)
    exported["indexer_types"] = ["full" if letter == "F" else "shared" for letter in pattern]
    if exported.get("index_topk_freq") is None and exported.get("index_topk_pattern") is None:
        exported["index_topk_pattern"] = pattern
    return exported
