"""Floating-point operations of one forward pass. A multiply-add counts 2."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture, LayerSchedule


def forward_flops(architecture: DeepseekV4Architecture, seq_lens: Sequence[int]) -> float:
    """Matrices that one token is multiplied with, LM head included and embedding excluded;
    4 * heads * head_dim per query and key row it reads; the indexer, always counted, though rows
    whose documents are all short leave it out. Element-wise work (mixing streams, Sinkhorn, the
    pooling of windows) is not counted."""
    tokens = sum(seq_lens)
    width = architecture.num_heads * architecture.head_dim
    pairs = sum(
        attended_rows(architecture, layer, length)
        for layer in architecture.layers
        for length in seq_lens
    )
    return (
        2.0 * active_matrix_parameters(architecture) * tokens
        + 4.0 * width * pairs
        + indexer_flops(architecture, seq_lens)
    )


def active_matrix_parameters(architecture: DeepseekV4Architecture) -> int:
    """Entries of all matrices that one token is multiplied with, indexers left out."""
    hidden, experts = architecture.hidden_size, architecture.experts
    streams = architecture.hyper.streams
    width = architecture.num_heads * architecture.head_dim
    latent = hidden * (architecture.query_rank + architecture.head_dim)
    output = architecture.output_rank * (width + architecture.output_groups * hidden)
    attention = latent + architecture.query_rank * width + output
    routed = (experts.per_token + 1) * 3 * hidden * experts.intermediate_size
    maps = 2 * (2 + streams) * streams * streams * hidden
    every = attention + routed + hidden * experts.count + maps
    compressors = sum(
        2 * hidden * architecture.head_dim * (2 if layer.kind == "csa" else 1)
        for layer in architecture.layers
        if layer.ratio
    )
    head = streams * streams * hidden + hidden * architecture.vocab_size
    return architecture.num_layers * every + compressors + head


def indexer_flops(architecture: DeepseekV4Architecture, seq_lens: Sequence[int]) -> float:
    """Of the indexers, which have no backward pass: projections of every token, and one score per
    query and visible entry."""
    sizes, hidden = architecture.indexer, architecture.hidden_size
    width = sizes.heads * sizes.head_dim
    per_token = architecture.query_rank * width + hidden * (4 * sizes.head_dim + sizes.heads)
    ratios = [layer.ratio for layer in architecture.layers if layer.kind == "csa"]
    scores = sum(visible_entries(length, ratio) for ratio in ratios for length in seq_lens)
    return 2.0 * (len(ratios) * per_token * sum(seq_lens) + width * scores)


def attended_rows(architecture: DeepseekV4Architecture, layer: LayerSchedule, length: int) -> int:
    """Key rows read by all queries of a document together, per head."""
    window = min(architecture.window, length)
    local = window * (window + 1) // 2 + (length - window) * window
    if not layer.ratio:
        return local
    top_k = architecture.indexer.top_k if layer.kind == "csa" else length
    return local + visible_entries(length, layer.ratio, top_k)


def visible_entries(length: int, ratio: int, limit: int | None = None) -> int:
    """sum over t < length of min((t + 1) // ratio, limit)."""
    entries, rest = divmod(length, ratio)
    if limit is None or entries <= limit:
        return ratio * entries * (entries - 1) // 2 + entries * (rest + 1)
    return visible_entries(limit * ratio, ratio) + (length - limit * ratio) * limit
