"""The indexer: chooses the keys a query attends to.

T tokens, H hidden size, Q query rank, J indexer heads, D indexer head size, R rotary dimensions,
N keys selected per query.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.api.backends import DSABackend
from prime_rl.layers.float8_linear import make_linear
from prime_rl.layers.rotary import PairRotation, rotate_pairs
from prime_rl_model_glm5.architecture import Glm5Architecture
from prime_rl_model_glm5.numerics import Numerics, quantise_index

KEY_NORM_EPS = 1e-6


class Visible(NamedTuple):
    """Keys a query may see: rows first <= s < last, from its document's start to itself."""

    first_T: Tensor
    last_T: Tensor


class Indexer(nn.Module):
    """Scores every visible key with sum_j w_j relu(q_j . k) and keeps the largest.

    Nothing here has a gradient. Projections compute in the weights' dtype, all that follows in
    float32, as the server's fused kernel does. Positive constant factors are left out: they
    change no order.
    """

    def __init__(
        self, architecture: Glm5Architecture, backend: DSABackend, numerics: Numerics
    ) -> None:
        super().__init__()
        self.is_fp8 = numerics.fp8_indexer
        hidden, indexing = architecture.hidden_size, architecture.indexing
        self.heads, self.top_k = indexing.heads, indexing.top_k
        self.rotary_dim = architecture.attention.rotary_dim
        self.backend = backend
        width = indexing.heads * indexing.head_dim
        self.query = make_linear(architecture.attention.query_rank, width, numerics.linear_scales)
        self.key = nn.Linear(hidden, indexing.head_dim, bias=False)
        self.key_norm = nn.LayerNorm(indexing.head_dim, KEY_NORM_EPS)
        self.head_weights = nn.Linear(hidden, indexing.heads, bias=False)

    @torch.no_grad()
    def forward(
        self, x_TH: Tensor, query_latent_TQ: Tensor, rotation: PairRotation, visible: Visible
    ) -> Tensor:
        """int64 [T, N] rows of the keys each query attends to, -1 where there are fewer."""
        query_TJD = self.query(query_latent_TQ).float().unflatten(1, (self.heads, -1))
        norm = self.key_norm
        key_TD = F.layer_norm(
            self.key(x_TH).float(),
            norm.normalized_shape,
            norm.weight.float(),
            norm.bias.float(),
            norm.eps,
        )
        query_TJD = self._rotate(query_TJD, rotation)
        key_TD = self._rotate(key_TD, rotation)
        weights_TJ = self.head_weights(x_TH).float()
        if self.is_fp8:
            query_TJD, key_TD, weights_TJ = quantise_index(query_TJD, key_TD, weights_TJ)
        return self.backend.select(
            query_TJD, key_TD, weights_TJ, visible.first_T, visible.last_T, self.top_k
        )

    def _rotate(self, x: Tensor, rotation: PairRotation) -> Tensor:
        """Only the first rotary dimensions of a head turn."""
        turned, still = x.tensor_split([self.rotary_dim], dim=-1)
        return torch.cat((rotate_pairs(turned, rotation), still), dim=-1)
