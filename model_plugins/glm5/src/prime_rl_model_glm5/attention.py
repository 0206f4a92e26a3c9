"""Multi-head latent attention over selected keys, in its absorbed form.

T tokens, H hidden size, Q query rank, N query heads, P plain and R rotary part of a head's query,
C latent width, V value size, S selected keys.

A head's logit is q_plain . (W_k c) + q_rotary . k_rotary = (q_plain W_k) . c + q_rotary . k_rotary,
and its output sum p W_v c = W_v (sum p c): every head reads the same rows [c | k_rotary], so keys
and values are never made per head.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.api.backends import DSABackend
from prime_rl.layers.norms import RMSNorm
from prime_rl.layers.rotary import PairRotation, rotate_pairs
from prime_rl_model_glm5.architecture import Glm5Architecture
from prime_rl_model_glm5.indexer import Indexer, Visible


class Attention(nn.Module):
    """Chooses keys, or takes those of an earlier layer, and attends to them."""

    def __init__(self, architecture: Glm5Architecture, layer: int, backend: DSABackend) -> None:
        super().__init__()
        self.sizes = sizes = architecture.attention
        self.backend = backend
        hidden, eps = architecture.hidden_size, architecture.norm_eps
        latents = sizes.query_rank + sizes.latent_dim + sizes.rotary_dim
        self.latents = nn.Linear(hidden, latents, bias=False)
        self.query_norm = RMSNorm(sizes.query_rank, eps, round_late=True)
        query = sizes.heads * (sizes.plain_dim + sizes.rotary_dim)
        self.query = nn.Linear(sizes.query_rank, query, bias=False)
        self.latent_norm = RMSNorm(sizes.latent_dim, eps, round_late=True)
        key_value = sizes.heads * (sizes.plain_dim + sizes.value_dim)
        self.key_value = nn.Linear(sizes.latent_dim, key_value, bias=False)
        self.out = nn.Linear(sizes.heads * sizes.value_dim, hidden, bias=False)
        is_full = layer in architecture.indexing.full_layers
        self.indexer = Indexer(architecture, backend) if is_full else None

    def forward(
        self, x_TH: Tensor, rotation: PairRotation, visible: Visible, rows_TS: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """(output [T, H], rows attended to). `rows_TS` are those of the layer before."""
        sizes = self.sizes
        split = (sizes.query_rank, sizes.latent_dim, sizes.rotary_dim)
        query_latent_TQ, latent_TC, key_TR = self.latents(x_TH).split(split, dim=-1)
        query_latent_TQ = self.query_norm(query_latent_TQ)
        if self.indexer is not None:
            rows_TS = self.indexer(x_TH, query_latent_TQ, rotation, visible)
        assert rows_TS is not None, "the first layer has no indexer"
        cached_TD = torch.cat((self.latent_norm(latent_TC), rotate_pairs(key_TR, rotation)), dim=-1)
        key_weight_NPC, value_weight_NVC = self.key_value.weight.unflatten(
            0, (sizes.heads, -1)
        ).split((sizes.plain_dim, sizes.value_dim), dim=1)
        query_TND = self._absorbed_query(query_latent_TQ, key_weight_NPC, rotation)
        mixed_TNC = self.backend.attend(
            query_TND,
            cached_TD.unsqueeze(1),
            None,
            rows_TS,
            sizes.scale,
            value_size=sizes.latent_dim,
        )
        mixed_TNV = torch.einsum("tnc,nvc->tnv", mixed_TNC, value_weight_NVC)
        return self.out(mixed_TNV.flatten(1)), rows_TS

    def _absorbed_query(
        self, query_latent_TQ: Tensor, key_weight_NPC: Tensor, rotation: PairRotation
    ) -> Tensor:
        """[T, N, C + R]: queries as they meet the cached rows."""
        query_TNE = self.query(query_latent_TQ).unflatten(1, (self.sizes.heads, -1))
        plain_TNP, turned_TNR = query_TNE.split((self.sizes.plain_dim, self.sizes.rotary_dim), -1)
        absorbed_TNC = torch.einsum("tnp,npc->tnc", plain_TNP, key_weight_NPC)
        return torch.cat((absorbed_TNC, rotate_pairs(turned_TNR, rotation)), dim=-1)
