"""Qwen3.8 passes the model kit."""

from collections.abc import Mapping
from typing import Any

import qwen3_8_slow as slow
import torch

from prime_rl.api import Kernels
from prime_rl.testing.model import LENGTHS, ModelConformance
from prime_rl.testing.plain_backends import CountedAttention

PLAIN = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "output_gate_type": "sigmoid",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
    "hc_count": 4,
    "hc_lowrank": 6,
    "ple_layer_ids": [2],
    "ple_embed_dim": 24,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 3,
    "indexer_n_heads": 2,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 12,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "eos_token_id": 1,
}
WITHOUT_TABLE = {
    **PLAIN,
    "model_type": "qwen3_8_flash_next_text",
    "ple_layer_ids": [],
    "output_gate_type": None,
    "layer_types": ["linear_attention", "qwen_sparse_attention", "indexed_attention"],
    "tie_word_embeddings": True,
    "norm_topk_prob": False,
    "indexer_budget": 6,
    "indexer_compress_ratio": 2,
}
OUTER = {
    "model_type": "qwen4_exp",
    "split_ngram_parts": 512,
    "text_config": {**PLAIN, "ple_layer_ids": [1, 2]},
}


class TestQwen38(ModelConformance):
    plugin_name = "qwen3_8"
    configs = (PLAIN, WITHOUT_TABLE, OUTER)
    required_keys = (*ModelConformance.required_keys, "num_experts", "indexer_budget")

    def module(
        self, config: Mapping[str, Any], seed: int = 0, kernels: Kernels | None = None
    ) -> torch.nn.Module:
        """Where operations are counted, the delta rule is its recurrence: that is what `flops`
        counts, whatever the chunks do (more products, all of them large)."""
        module = super().module(config, seed, kernels)
        if kernels is not None and isinstance(kernels.attention, CountedAttention):
            for block in module.layers:
                if block.delta is not None:
                    block.delta.rule = counted_rule
        return module


def counted_rule(*inputs: Any) -> torch.Tensor:
    """Document by document."""
    parts = zip(*(tensor.split(LENGTHS) for tensor in inputs[:-1]), strict=True)
    return torch.cat([slow.recurrence(*part) for part in parts])
