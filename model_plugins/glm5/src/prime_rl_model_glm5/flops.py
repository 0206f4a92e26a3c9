"""Floating-point operations of one forward pass. A multiply-add counts 2."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl_model_glm5.architecture import Glm5Architecture


def forward_flops(architecture: Glm5Architecture, seq_lens: Sequence[int]) -> float:
    """2 * active matrix parameters per token (LM head included, embedding not), the attention over
    selected keys in its absorbed form, and the indexers.

    The indexers have no backward pass, so three times this overstates training by twice their part.
    """
    parts = (
        2.0 * active_matrix_parameters(architecture) * sum(seq_lens),
        attention_flops(architecture, seq_lens),
        indexer_flops(architecture, seq_lens),
    )
    return sum(parts)


def active_matrix_parameters(architecture: Glm5Architecture) -> int:
    """Entries of all matrices that one token is multiplied with, the indexers' apart."""
    hidden, sizes, experts = architecture.hidden_size, architecture.attention, architecture.experts
    attention = (
        hidden * sizes.query_rank
        + sizes.query_rank * sizes.heads * (sizes.plain_dim + sizes.rotary_dim)
        + hidden * (sizes.latent_dim + sizes.rotary_dim)
        + sizes.latent_dim * sizes.heads * (sizes.plain_dim + sizes.value_dim)
        + sizes.heads * sizes.value_dim * hidden
    )
    dense = 3 * hidden * architecture.intermediate_size
    chosen = experts.per_token + experts.shared_count
    routed = hidden * experts.count + 3 * hidden * experts.intermediate_size * chosen
    return (
        architecture.num_layers * attention
        + len(architecture.dense_layers) * dense
        + len(architecture.moe_layers) * routed
        + hidden * architecture.vocab_size
    )


def attention_flops(architecture: Glm5Architecture, seq_lens: Sequence[int]) -> float:
    """Logits over latent and rotary dimensions, sums over latent dimensions, for selected keys."""
    sizes, top_k = architecture.attention, architecture.indexing.top_k
    pairs = 0
    for length in seq_lens:
        growing = min(length, top_k)
        pairs += growing * (growing + 1) // 2 + (length - growing) * top_k
    per_pair = 2 * sizes.heads * (2 * sizes.latent_dim + sizes.rotary_dim)
    return float(architecture.num_layers * per_pair * pairs)


def indexer_flops(architecture: Glm5Architecture, seq_lens: Sequence[int]) -> float:
    """Projections of the indexers and their scores for every visible key."""
    indexing, hidden = architecture.indexing, architecture.hidden_size
    width = indexing.heads * indexing.head_dim
    matrices = architecture.attention.query_rank * width + hidden * (
        indexing.head_dim + indexing.heads
    )
    visible = sum(length * (length + 1) // 2 for length in seq_lens)
    per_layer = 2 * matrices * sum(seq_lens) + 2 * width * visible
    return float(len(indexing.full_layers) * per_layer)
