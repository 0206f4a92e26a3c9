"""Grouped-query attention without any positional encoding and without norms.

T tokens, H hidden size, N query heads, K key and value heads, D head size.
"""

from __future__ import annotations

from torch import Tensor, nn

from prime_rl.api.backends import AttentionBackend
from prime_rl.api.batch import PackedBatch
from prime_rl_model_nemotron_h.architecture import AttentionSettings


class Attention(nn.Module):
    """The Mamba layers tell tokens apart by their place; attention need not."""

    def __init__(self, hidden: int, settings: AttentionSettings, backend: AttentionBackend) -> None:
        super().__init__()
        self.backend = backend
        self.head_dim = settings.head_dim
        self.heads = (settings.heads, settings.key_value_heads, settings.key_value_heads)
        self.qkv = nn.Linear(hidden, sum(self.heads) * settings.head_dim, bias=False)
        self.out = nn.Linear(settings.heads * settings.head_dim, hidden, bias=False)

    def forward(self, x_TH: Tensor, batch: PackedBatch) -> Tensor:
        fused = self.qkv(x_TH).unflatten(1, (-1, self.head_dim))
        q_TND, k_TKD, v_TKD = fused.split(self.heads, dim=1)
        mixed_TND = self.backend.attend(
            q_TND, k_TKD, v_TKD, batch.cu_seqlens, batch.lengths, self.head_dim**-0.5
        )
        result: Tensor = self.out(mixed_TND.flatten(1))
        return result
