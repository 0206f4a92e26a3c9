"""DeepSeek V4 passes the model kit."""

from typing import Any

from prime_rl.testing.model import ModelConformance

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
EVERY_LAYER: dict[str, Any] = {
    "model_type": "deepseek_v4",
    "vocab_size": 96,
    "hidden_size": 32,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "qk_rope_head_dim": 8,
    "q_lora_rank": 24,
    "o_groups": 2,
    "o_lora_rank": 12,
    "sliding_window": 5,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "layer_types": [CSA, HCA, SLIDING, CSA],
    "compress_rates": {CSA: 4, HCA: 6},
    "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
    "index_n_heads": 16,
    "index_head_dim": 12,
    "index_topk": 2,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}
ORIGINAL_KEYS: dict[str, Any] = {
    **{
        key: value
        for key, value in EVERY_LAYER.items()
        if key not in ("layer_types", "compress_rates", "mlp_layer_types", "rope_scaling")
    },
    "num_hidden_layers": 3,
    "compress_ratios": [4, 0, 4, 0],
    "num_hash_layers": 1,
    "index_topk": 3,
    "hc_mult": 2,
}


class TestDeepseekV4(ModelConformance):
    plugin_name = "deepseek_v4"
    configs = (EVERY_LAYER, ORIGINAL_KEYS)
    required_keys = (
        *ModelConformance.required_keys,
        "q_lora_rank",
        "qk_rope_head_dim",
        "n_routed_experts",
        "sliding_window",
        "index_topk",
    )
