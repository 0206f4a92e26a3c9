"""Floating-point operations of one forward pass. A multiply-add counts 2."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl_model_qwen3_8.architecture import DeltaSizes, Qwen38Architecture, SparseSizes


def forward_flops(architecture: Qwen38Architecture, seq_lens: Sequence[int]) -> float:
    """Matrix products per token, the recurrence of the delta rule, and what each sparse layer reads.

    Embedding, table look-ups and convolutions count nothing. The delta rule is counted as the plain
    recurrence, whatever its chunks do; the indexer of every document, even of those so short that
    nothing is left out and it does not run.
    """
    total = float(per_token(architecture)) * sum(seq_lens)
    sparse = architecture.sparse
    if sparse is not None:
        total += len(architecture.sparse_layers) * sum(
            _reading(sparse, length) for length in seq_lens
        )
    return total


def per_token(architecture: Qwen38Architecture) -> int:
    """What every token costs, wherever it stands; the head included."""
    hidden = architecture.hidden_size
    width = architecture.streams * hidden
    rank = architecture.mix_rank
    layers = architecture.num_layers
    mixing = width * (2 * rank + architecture.streams)
    matrices = layers * (2 * mixing + _experts(architecture)) + 2 * width * rank
    matrices += sum(table.width * (width + hidden) for table in architecture.tables)
    matrices += hidden * architecture.vocab_size
    matrices += len(architecture.delta_layers) * _delta_matrices(architecture.delta, hidden)
    if architecture.sparse is not None:
        sparse = _sparse_matrices(architecture.sparse, hidden)
        matrices += len(architecture.sparse_layers) * sparse
    delta = architecture.delta
    state = delta.value_heads * delta.key_dim * delta.value_dim
    # Decay, k^T S, outer product, q^T S: four multiply-adds per number of the state.
    return 2 * matrices + len(architecture.delta_layers) * 8 * state


def _experts(architecture: Qwen38Architecture) -> int:
    sizes, hidden = architecture.experts, architecture.hidden_size
    routed = sizes.per_token * sizes.intermediate
    return hidden * (sizes.count + 3 * (routed + sizes.shared_intermediate) + 1)


def _delta_matrices(sizes: DeltaSizes, hidden: int) -> int:
    into = sizes.qkv_width + sizes.value_width + 2 * sizes.value_heads
    return hidden * (into + sizes.value_width)


def _sparse_matrices(sizes: SparseSizes, hidden: int) -> int:
    heads = 3 * sizes.heads + 2 * sizes.key_value_heads  # q, gate and output; keys and values
    return hidden * (heads * sizes.head_dim + (sizes.index_heads + 1) * sizes.index_dim)


def _reading(sizes: SparseSizes, length: int) -> int:
    """Index scores and attention of one document in one layer.

    The token that is the u-th of its document sees u // B blocks, reads the best of them and the
    u % B tokens after them.
    """
    block = sizes.block
    rated = _sum_of_quotients(length, block)
    full = sizes.top_blocks * block
    read = rated
    if length >= full:
        read = _sum_of_quotients(full - 1, block) + sizes.top_blocks * (length - full + 1)
    whole, rest = divmod(length, block)
    tail = whole * (block * (block - 1) // 2) + rest * (rest + 1) // 2
    scores = 2 * sizes.index_heads * sizes.index_dim * rated
    return scores + 4 * sizes.heads * sizes.head_dim * (read * block + tail)


def _sum_of_quotients(length: int, block: int) -> int:
    """Sum of u // B for u from 1 to `length`."""
    whole, rest = divmod(length, block)
    return block * (whole * (whole - 1) // 2) + whole * (rest + 1)
