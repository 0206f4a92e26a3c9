"""The attention of all three kinds of layer: local keys, and compressed entries where there are.

T tokens, C entries, S = T + C key rows, H heads, D head size, Q query rank, N rows per query.
One key row serves all heads and is its own value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.api.backends import DSABackend
from prime_rl.layers.float8_linear import make_linear
from prime_rl.layers.norms import RMSNorm, rms_norm_late
from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture
from prime_rl_model_deepseek_v4.compressor import Compressor
from prime_rl_model_deepseek_v4.grouped import GroupedLinear
from prime_rl_model_deepseek_v4.indexer import Indexer
from prime_rl_model_deepseek_v4.numerics import PLAIN, Numerics, round_rows
from prime_rl_model_deepseek_v4.places import Entries, Places
from prime_rl_model_deepseek_v4.rope import rotate_tail


class Sink(nn.Module):
    """A float32 logit per head that takes weight and gives no value."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.empty(heads, dtype=torch.float32))

    def forward(self, empty: Tensor) -> Tensor:
        """`empty` is not read, see `Model.float32_modules`."""
        # Never the parameter itself, which a sharded module takes away after its forward.
        return self.logit.float().clone()


class Attention(nn.Module):
    """Softmax over the local window, the visible entries and the sink at once."""

    def __init__(
        self,
        architecture: DeepseekV4Architecture,
        layer: int,
        backend: DSABackend,
        numerics: Numerics = PLAIN,
    ) -> None:
        super().__init__()
        self.numerics, scales = numerics, numerics.linear_scales
        self.rotary_dim = architecture.rotary_dim
        self.schedule = schedule = architecture.layers[layer]
        self.heads, self.head_dim = architecture.num_heads, architecture.head_dim
        self.eps = eps = architecture.norm_eps
        self.backend = backend
        hidden, rank = architecture.hidden_size, architecture.query_rank
        self.ranks = (rank, self.head_dim)
        width, groups = self.heads * self.head_dim, architecture.output_groups
        self.latent = make_linear(hidden, sum(self.ranks), scales)
        """Rows of the query latent, then of the key."""
        self.query_norm = RMSNorm(rank, eps, round_late=True)
        self.query = make_linear(rank, width, scales)
        self.key_norm = RMSNorm(self.head_dim, eps, round_late=True)
        self.sink = Sink(self.heads)
        self.out_groups = GroupedLinear(
            groups, width // groups, architecture.output_rank, numerics.grouped_scales
        )
        self.out = make_linear(groups * architecture.output_rank, hidden, scales)
        ratio, is_csa = schedule.ratio, schedule.kind == "csa"
        self.compressor = (
            Compressor(hidden, self.head_dim, ratio, overlap=is_csa, eps=eps) if ratio else None
        )
        self.indexer = Indexer(architecture, ratio, numerics) if is_csa else None

    def forward(self, x_TH: Tensor, places: Places) -> Tensor:
        """[T, hidden]."""
        is_sliding = self.compressor is None
        rotation = places.main_rotation if is_sliding else places.compress_rotation
        latent_TQ, key_TD = self.latent(x_TH).split(self.ranks, dim=-1)
        latent_TQ = self.query_norm(latent_TQ)
        q_THD = self.query(latent_TQ).unflatten(1, (self.heads, self.head_dim))
        # One rounding after norm and rope together, as servers do.
        q_THD = rotate_tail(rms_norm_late(q_THD.float(), None, self.eps), rotation).to(x_TH.dtype)
        rows_SD = rotate_tail(self.key_norm(key_TD), rotation)
        chosen_TN = places.window_rows_TW
        if self.compressor is not None:
            entries = places.entries[self.schedule.ratio]
            rows_SD = torch.cat((rows_SD, self.compressor(x_TH, entries)))
            chosen_TN = self._choose(x_TH, latent_TQ, places, entries)
        if self.numerics.fp8_cache:
            rows_SD = round_rows(rows_SD, self.rotary_dim)
        mixed_THD = self.backend.attend(
            q_THD,
            rows_SD[:, None],
            None,
            chosen_TN,
            self.head_dim**-0.5,
            sink_H=self.sink(x_TH.new_empty(0)),
            value_size=self.head_dim,
        )
        # Values carry the rope of their place: turned back, what is left is the distance.
        if self.numerics.grouped_scales is not None:
            mixed_THD = mixed_THD.float()  # 8-bit inputs are rounded from the float32 rotation
        mixed_THD = rotate_tail(mixed_THD, rotation, inverse=True)
        result: Tensor = self.out(self.out_groups(mixed_THD))
        return result

    def _choose(self, x_TH: Tensor, latent_TQ: Tensor, places: Places, entries: Entries) -> Tensor:
        """Rows of the keys that each token reads. Nothing is scored where all entries fit."""
        if self.indexer is None or entries.most <= self.indexer.top_k:
            return entries.all_rows_TN
        rotation = places.compress_rotation
        chosen_TN = self.indexer(x_TH, latent_TQ, entries, rotation, self.backend)
        local = x_TH.shape[0]
        entry_rows_TN = torch.where(chosen_TN >= 0, chosen_TN + local, -1)
        return torch.cat((places.window_rows_TW, entry_rows_TN), dim=1)
