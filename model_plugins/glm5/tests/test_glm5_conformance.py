"""GLM-5 passes the model kit. Documents have up to 17 tokens, queries at most 6 keys."""

from prime_rl.testing.model import ModelConformance

SELECTING = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 128,
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 24,
    "q_lora_rank": 40,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "first_k_dense_replace": 1,
    "index_topk": 6,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "index_topk_pattern": "FSFSS",
}


class TestGlm5(ModelConformance):
    plugin_name = "glm5"
    configs = (
        SELECTING,
        {
            **SELECTING,
            "tie_word_embeddings": True,
            "index_topk_pattern": None,
            "mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "dense"],
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "norm_topk_prob": False,
            "num_nextn_predict_layers": 1,
        },
    )
    required_keys = (
        *ModelConformance.required_keys,
        "kv_lora_rank",
        "index_topk",
        "n_routed_experts",
        "routed_scaling_factor",
        "rms_norm_eps",
    )
