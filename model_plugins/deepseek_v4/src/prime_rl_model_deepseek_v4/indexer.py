"""The lightning indexer: chooses the compressed entries that each query of a CSA layer reads.

T tokens, J index heads, I index head size, C entries, N chosen entries. Nothing here has a
gradient: a choice has none, and the language-model loss reaches the indexer no other way.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.api.backends import DSABackend
from prime_rl.layers.float8_linear import make_linear
from prime_rl.layers.rotary import PairRotation
from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture
from prime_rl_model_deepseek_v4.compressor import Compressor
from prime_rl_model_deepseek_v4.numerics import Numerics, quantise_index
from prime_rl_model_deepseek_v4.places import Entries
from prime_rl_model_deepseek_v4.rope import rotate_tail


class Indexer(nn.Module):
    """score(t, j) = sum over heads of w[t, h] relu(q[t, h] . k[j]), factors that do not change the
    order left out; q has neither norm nor bias, w any sign."""

    def __init__(
        self, architecture: DeepseekV4Architecture, ratio: int, numerics: Numerics
    ) -> None:
        super().__init__()
        self.is_fp8 = numerics.fp8_indexer
        sizes, hidden = architecture.indexer, architecture.hidden_size
        self.heads, self.top_k = sizes.heads, sizes.top_k
        self.compressor = Compressor(
            hidden, sizes.head_dim, ratio, overlap=True, eps=architecture.norm_eps
        )
        self.query = make_linear(
            architecture.query_rank, sizes.heads * sizes.head_dim, numerics.linear_scales
        )
        self.weights = nn.Linear(hidden, sizes.heads, bias=False)

    @torch.no_grad()
    def forward(
        self,
        x_TH: Tensor,
        latent_TQ: Tensor,
        entries: Entries,
        rotation: PairRotation,
        backend: DSABackend,
    ) -> Tensor:
        """int64 [T, N] entries; -1 for none. `latent` is the attention's normalised query latent,
        `rotation` that of the tokens."""
        k_CI = self.compressor(x_TH, entries)
        q_TJI = rotate_tail(self.query(latent_TQ).unflatten(1, (self.heads, -1)), rotation)
        w_TJ = self.weights(x_TH)
        if self.is_fp8:
            q_TJI, k_CI, w_TJ = quantise_index(q_TJI, k_CI, w_TJ)
        return backend.select(q_TJI, k_CI, w_TJ, entries.first_T, entries.last_T, self.top_k)
