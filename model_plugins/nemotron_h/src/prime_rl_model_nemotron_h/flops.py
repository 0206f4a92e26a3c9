"""Floating-point operations of one forward pass. A multiply-add counts 2."""

from __future__ import annotations

from collections.abc import Sequence

from prime_rl_model_nemotron_h.architecture import MambaSettings, NemotronHArchitecture


def forward_flops(architecture: NemotronHArchitecture, seq_lens: Sequence[int]) -> float:
    """2 * active matrix parameters per token, LM head included and embedding excluded, the scan of
    every token, and 4 * heads * head_dim per causal query-key pair and attention layer.

    The filling up of a row's last chunk is not counted, nor is what is done element by element.
    """
    tokens = sum(seq_lens)
    total = 2.0 * active_matrix_parameters(architecture) * tokens
    if architecture.mamba is not None:
        total += len(architecture.layers("mamba")) * scan_flops(architecture.mamba) * tokens
    if architecture.attention is not None:
        width = architecture.attention.heads * architecture.attention.head_dim
        pairs = sum(length * (length + 1) / 2 for length in seq_lens)
        total += len(architecture.layers("attention")) * 4 * width * pairs
    return total


def scan_flops(settings: MambaSettings) -> int:
    """Of one token in one layer: C.B within its chunk, applied to the inputs; into and out of the
    state."""
    scores = 2 * settings.chunk * settings.groups * settings.state
    apply = 2 * settings.chunk * settings.inner
    return scores + apply + 4 * settings.state * settings.inner


def active_matrix_parameters(architecture: NemotronHArchitecture) -> int:
    """Entries of all matrices that one token is multiplied with."""
    hidden = architecture.hidden_size
    per_kind = {"mamba": 0, "attention": 0, "moe": 0, "mlp": 0}
    if architecture.mamba is not None:
        per_kind["mamba"] = hidden * (architecture.mamba.projected + architecture.mamba.inner)
    if architecture.attention is not None:
        heads = 2 * architecture.attention.heads + 2 * architecture.attention.key_value_heads
        per_kind["attention"] = hidden * heads * architecture.attention.head_dim
    if architecture.experts is not None:
        experts = architecture.experts
        latent = experts.latent_size
        width = hidden if latent is None else latent
        per_kind["moe"] = (
            experts.count * hidden
            + 2 * experts.per_token * width * experts.intermediate_size
            + 2 * hidden * experts.shared_intermediate_size
            + (0 if latent is None else 2 * hidden * latent)
        )
    if architecture.mlp_size is not None:
        per_kind["mlp"] = 2 * hidden * architecture.mlp_size
    return sum(per_kind[kind] for kind in architecture.kinds) + hidden * architecture.vocab_size
