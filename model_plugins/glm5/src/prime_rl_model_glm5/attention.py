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
from prime_rl.layers.float8 import round_bfloat16
from prime_rl.layers.float8_linear import make_linear
from prime_rl.layers.float8_weights import round_blocks
from prime_rl.layers.norms import RMSNorm, rms_norm_late
from prime_rl.layers.rotary import PairRotation, rotate_pairs
from prime_rl_model_glm5.architecture import Glm5Architecture
from prime_rl_model_glm5.indexer import Indexer, Visible
from prime_rl_model_glm5.numerics import Numerics, round_latents


class Attention(nn.Module):
    """Chooses keys, or takes those of an earlier layer, and attends to them."""

    def __init__(
        self,
        architecture: Glm5Architecture,
        layer: int,
        backend: DSABackend,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        self.numerics = numerics
        scales = numerics.linear_scales
        self.sizes = sizes = architecture.attention
        self.backend = backend
        hidden, eps = architecture.hidden_size, architecture.norm_eps
        latents = sizes.query_rank + sizes.latent_dim + sizes.rotary_dim
        self.latents = make_linear(hidden, latents, scales)
        self.query_norm = RMSNorm(sizes.query_rank, eps, round_late=True)
        query = sizes.heads * (sizes.plain_dim + sizes.rotary_dim)
        self.query = make_linear(sizes.query_rank, query, scales)
        self.latent_norm = RMSNorm(sizes.latent_dim, eps, round_late=True)
        key_value = sizes.heads * (sizes.plain_dim + sizes.value_dim)
        self.key_value = nn.Linear(sizes.latent_dim, key_value, bias=False)
        self.out = make_linear(sizes.heads * sizes.value_dim, hidden, scales)
        is_full = layer in architecture.indexing.full_layers
        self.indexer = Indexer(architecture, backend, numerics) if is_full else None

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
        cached_TD = self._cached_rows(latent_TC, _rotate(key_TR, rotation))
        key_weight_NPC, value_weight_NVC = self._key_value_weights()
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

    def _cached_rows(self, latent_TC: Tensor, key_TR: Tensor) -> Tensor:
        """[T, C + R]: keys and values as they are read from the server's cache."""
        norm = self.latent_norm
        if not self.numerics.fp8_cache:
            return torch.cat((norm(latent_TC), key_TR), dim=-1)
        # The server rounds its float32 norm to 8 bits, without bfloat16 between.
        normal_TC = rms_norm_late(latent_TC.float(), norm.weight, norm.eps)
        rounded_TC = round_latents(normal_TC).to(latent_TC.dtype)
        return torch.cat((rounded_TC, round_bfloat16(key_TR)), dim=-1)

    def _key_value_weights(self) -> tuple[Tensor, Tensor]:
        """W_k [N, P, C] and W_v [N, V, C]. A server that keeps them in 8 bits attends with their
        dequantised values, so only weights are rounded here, never inputs."""
        weight = self.key_value.weight
        if self.numerics.linear_scales is not None:
            weight = round_blocks(weight, self.numerics.linear_scales)
        sizes = self.sizes
        by_head = weight.unflatten(0, (sizes.heads, -1))
        key_NPC, value_NVC = by_head.split((sizes.plain_dim, sizes.value_dim), dim=1)
        return key_NPC, value_NVC

    def _absorbed_query(
        self, query_latent_TQ: Tensor, key_weight_NPC: Tensor, rotation: PairRotation
    ) -> Tensor:
        """[T, N, C + R]: queries as they meet the cached rows."""
        query_TNE = self.query(query_latent_TQ).unflatten(1, (self.sizes.heads, -1))
        plain_TNP, turned_TNR = query_TNE.split((self.sizes.plain_dim, self.sizes.rotary_dim), -1)
        absorbed_TNC = torch.einsum("tnp,npc->tnc", plain_TNP, key_weight_NPC)
        return torch.cat((absorbed_TNC, _rotate(turned_TNR, rotation)), dim=-1)


def _rotate(x: Tensor, rotation: PairRotation) -> Tensor:
    """In float32 with one rounding at the end, as servers do; angles have the compute dtype."""
    return rotate_pairs(x.float(), rotation).to(x.dtype)
