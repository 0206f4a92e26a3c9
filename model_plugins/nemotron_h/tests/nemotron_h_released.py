"""The released models as their cards say: config.json, and every tensor with its shape."""

from collections.abc import Iterator
from typing import Any

COMMON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "vocab_size": 131072,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "chunk_size": 128,
    "expand": 2,
    "use_conv_bias": True,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 262144,
    "tie_word_embeddings": False,
    "use_bias": False,
    "mlp_bias": False,
    "attention_bias": False,
    "mlp_hidden_act": "relu2",
    "mamba_hidden_act": "silu",
    "time_step_limit": [0.0, {"__float__": "Infinity"}],
    "time_step_min": 0.001,
    "time_step_max": 0.1,
    "time_step_floor": 0.0001,
    "residual_in_fp32": False,
    "rope_theta": 10000,
    "partial_rotary_factor": 1.0,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
NANO: dict[str, Any] = {
    **COMMON,
    "hidden_size": 2688,
    "intermediate_size": 1856,
    "num_hidden_layers": 52,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_latent_size": None,
    "moe_shared_expert_intermediate_size": 3712,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 0,
    "eos_token_id": 2,
}
SUPER: dict[str, Any] = {
    **COMMON,
    "hidden_size": 4096,
    "intermediate_size": 2688,
    "num_hidden_layers": 88,
    "hybrid_override_pattern": (
        "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM*EMEMEMEME"
    ),
    "mamba_num_heads": 128,
    "n_routed_experts": 512,
    "num_experts_per_tok": 22,
    "moe_intermediate_size": 2688,
    "moe_latent_size": 1024,
    "moe_shared_expert_intermediate_size": 5376,
    "routed_scaling_factor": 5.0,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
    "eos_token_id": [2, 11],
}


def tensors(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of a release without its draft layers."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    yield "backbone.embeddings.weight", (vocabulary, hidden)
    for number, symbol in enumerate(config["hybrid_override_pattern"]):
        prefix = f"backbone.layers.{number}."
        yield prefix + "norm.weight", (hidden,)
        kind = {"M": _mamba, "*": _attention, "E": _experts}[symbol]
        yield from ((f"{prefix}mixer.{name}", shape) for name, shape in kind(config, hidden))
    yield "backbone.norm_f.weight", (hidden,)
    yield "lm_head.weight", (vocabulary, hidden)


def _mamba(config: dict[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    heads = config["mamba_num_heads"]
    inner = heads * 64
    channels = inner + 2 * 8 * 128
    yield "in_proj.weight", (inner + channels + heads, hidden)
    yield "conv1d.weight", (channels, 1, 4)
    yield "conv1d.bias", (channels,)
    for name in ("dt_bias", "A_log", "D"):
        yield name, (heads,)
    yield "norm.weight", (inner,)
    yield "out_proj.weight", (hidden, inner)


def _attention(config: dict[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "q_proj.weight", (4096, hidden)
    yield "k_proj.weight", (256, hidden)
    yield "v_proj.weight", (256, hidden)
    yield "o_proj.weight", (hidden, 4096)


def _experts(config: dict[str, Any], hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    count, inner = config["n_routed_experts"], config["moe_intermediate_size"]
    shared, latent = config["moe_shared_expert_intermediate_size"], config["moe_latent_size"]
    width = latent or hidden
    yield "gate.weight", (count, hidden)
    yield "gate.e_score_correction_bias", (count,)
    for expert in range(count):
        yield f"experts.{expert}.up_proj.weight", (inner, width)
        yield f"experts.{expert}.down_proj.weight", (width, inner)
    yield "shared_experts.up_proj.weight", (shared, hidden)
    yield "shared_experts.down_proj.weight", (hidden, shared)
    if latent is not None:
        yield "fc1_latent_proj.weight", (latent, hidden)
        yield "fc2_latent_proj.weight", (hidden, latent)
