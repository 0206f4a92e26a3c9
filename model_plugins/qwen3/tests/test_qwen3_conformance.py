"""Qwen3 passes the model kit."""

from prime_rl.testing.model import ModelConformance

DENSE = {
    "model_type": "qwen3",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": False,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


class TestQwen3(ModelConformance):
    plugin_name = "qwen3"
    configs = (
        DENSE,
        {**DENSE, "tie_word_embeddings": True, "attention_bias": True},
        {
            **DENSE,
            "num_key_value_heads": 4,
            "max_position_embeddings": 16,
            "rope_parameters": YARN,
        },
    )


class TestQwen3MoE(ModelConformance):
    plugin_name = "qwen3_moe"
    configs = (EXPERTS, {**EXPERTS, "norm_topk_prob": False, "decoder_sparse_step": 2})
    required_keys = (*ModelConformance.required_keys, "num_experts", "moe_intermediate_size")
