"""Floating-point operations of one forward pass. A multiply-add counts 2."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl_model_qwen3.architecture import Qwen3Architecture


def forward_flops(architecture: Qwen3Architecture, seq_lens: Sequence[int]) -> float:
    """2 * active matrix parameters per token, LM head included and embedding excluded, plus
    4 * heads * head_dim per causal query-key pair and layer."""
    tokens = sum(seq_lens)
    pairs = sum(length * (length + 1) / 2 for length in seq_lens)
    width = architecture.num_heads * architecture.head_dim
    attention = architecture.num_layers * 4 * width * pairs
    return 2.0 * active_matrix_parameters(architecture) * tokens + attention


def active_matrix_parameters(architecture: Qwen3Architecture) -> int:
    """Entries of all matrices that one token is multiplied with."""
    hidden = architecture.hidden_size
    width = architecture.num_heads * architecture.head_dim
    key_value_width = architecture.num_key_value_heads * architecture.head_dim
    attention = hidden * (width + 2 * key_value_width) + width * hidden
    dense = 3 * hidden * architecture.intermediate_size
    total = architecture.num_layers * attention + len(architecture.dense_layers) * dense
    if architecture.experts is not None:
        experts = architecture.experts
        routed = 3 * hidden * experts.intermediate_size * experts.per_token
        total += len(architecture.moe_layers) * (routed + hidden * experts.count)
    return total + hidden * architecture.vocab_size
