"""The released model on paper: config.json and every tensor of the bf16 checkpoint with its shape."""

from __future__ import annotations

from typing import Any

TEXT: dict[str, Any] = {
    "model_type": "qwen4_exp_text",
    "vocab_size": 248320,
    "hidden_size": 2560,
    "num_hidden_layers": 48,
    "full_attention_interval": 4,
    "layer_types": [
        "full_attention" if (layer + 1) % 4 == 0 else "linear_attention" for layer in range(48)
    ],
    "num_attention_heads": 24,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "max_position_embeddings": 262144,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "output_gate_type": "sigmoid",
    "hidden_act": "silu",
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 640,
    "router_aux_loss_coef": 0.001,
    "hc_count": 4,
    "hc_lowrank": 320,
    "rms_norm_eps": 1e-6,
    "ple_layer_ids": [2],
    "ple_embed_dim": 2560,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 8,
    "ngram_vocab_size_base": 20000000,
    "make_ngram_vocab_size_divisible_by": 128,
    "seed": 1234,
    "split_ngram_parts": 128,
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "eos_token_id": 248044,
    "tie_word_embeddings": False,
    "mtp_num_hidden_layers": 1,
}
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "split_ngram_parts": 512,  # stale, not to be read
    "text_config": TEXT,
    "vision_config": {"model_type": "qwen4_exp_vision", "depth": 27},
}
BACKBONE = 125_740_000_000
"""As quoted, to ten million."""
TABLE = 320_001_536 * 160

_STREAMS = {
    "hc_norm.weight": (10240,),
    "input_mix_weight_down.weight": (320, 10240),
    "input_mix_weight_up.weight": (10240, 320),
    "block_inject_weight.weight": (4, 10240),
}
_DELTA = {
    "in_proj_qkv.weight": (10240, 2560),
    "in_proj_z.weight": (6144, 2560),
    "in_proj_b.weight": (48, 2560),
    "in_proj_a.weight": (48, 2560),
    "conv1d.weight": (10240, 1, 4),
    "A_log": (48,),
    "dt_bias": (48,),
    "norm.weight": (128,),
    "out_proj.weight": (2560, 6144),
}
_ATTENTION = {
    "q_proj.weight": (12288, 2560),
    "k_proj.weight": (512, 2560),
    "v_proj.weight": (512, 2560),
    "o_proj.weight": (2560, 6144),
    "q_norm.weight": (256,),
    "k_norm.weight": (256,),
    "indexer.index_qk_proj.weight": (640, 2560),
    "indexer.q_layernorm.weight": (128,),
    "indexer.k_layernorm.weight": (128,),
}
_MLP = {
    "gate.weight": (512, 2560),
    "experts.gate_up_proj": (512, 1280, 2560),
    "experts.down_proj": (512, 2560, 640),
    "shared_expert.gate_proj.weight": (640, 2560),
    "shared_expert.up_proj.weight": (640, 2560),
    "shared_expert.down_proj.weight": (2560, 640),
    "shared_expert_gate.weight": (1, 2560),
}
_PLE = {
    "key_proj.weight": (10240, 2560),
    "value_proj.weight": (2560, 2560),
    "norm_key.weight": (10240,),
    "norm_query.weight": (10240,),
    "norm_conv.weight": (10240,),
    "conv1d.weight": (10240, 1, 4),
    "ple_embedding.layer_multipliers": (3,),
    "ple_embedding.ngram_heads_vocab_sizes": (16,),
    "ple_embedding.ngram_heads_offsets": (16,),
    **{f"ple_embedding.ngram_embedding.shard_{n}.weight": (2500012, 160) for n in range(128)},
}


def tensors() -> dict[str, tuple[int, ...]]:
    """Every name of the language model in the released bf16 checkpoint."""
    prefix = "model.language_model."
    named: dict[str, tuple[int, ...]] = {"lm_head.weight": (248320, 2560)}
    groups: dict[str, dict[str, tuple[int, ...]]] = {
        "": {"embed_tokens.weight": (248320, 2560)},
        "layers.1.ple.": _PLE,
        "hyper_connection_mixer.": {
            name: shape for name, shape in _STREAMS.items() if "inject" not in name
        },
    }
    for layer in range(48):
        start = f"layers.{layer}."
        groups[start + "attn_hyper_connection."] = _STREAMS
        groups[start + "mlp_hyper_connection."] = _STREAMS
        groups[start + "mlp."] = _MLP
        if (layer + 1) % 4 == 0:
            groups[start + "self_attn."] = _ATTENTION
        else:
            groups[start + "linear_attn."] = _DELTA
    for start, group in groups.items():
        named |= {prefix + start + name: shape for name, shape in group.items()}
    return named
