"""The attention of all three kinds of layer: local keys, and compressed entries where there are.

T tokens, C entries, S = T + C key rows, H heads, D head size, Q query rank, N rows per query,
G groups of heads, O output rank. One key row serves all heads and is its own value.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.api.backends import DSABackend
from prime_rl.layers.norms import RMSNorm, rms_norm_late
from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture
from prime_rl_model_deepseek_v4.compressor import Compressor
from prime_rl_model_deepseek_v4.indexer import Indexer
from prime_rl_model_deepseek_v4.places import Entries, Places
from prime_rl_model_deepseek_v4.rope import rotate_tail


class Sink(nn.Module):
    """A float32 logit per head that takes weight and gives no value."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.logit = nn.Parameter(torch.empty(heads, dtype=torch.float32))

    def forward(self) -> Tensor:
        # Never the parameter itself, which a sharded module takes away after its forward.
        return self.logit.float().clone()


class GroupedLinear(nn.Module):
    """A matrix per group of heads: weight [G O, H D / G], the groups' rows one after the other."""

    def __init__(self, groups: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * outputs, inputs))

    def forward(self, x_THD: Tensor) -> Tensor:
        """[T, G O]."""
        x_GTI = x_THD.flatten(1).unflatten(1, (self.groups, -1)).transpose(0, 1)
        weight_GIO = self.weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return torch.bmm(x_GTI, weight_GIO).transpose(0, 1).flatten(1)


class Attention(nn.Module):
    """Softmax over the local window, the visible entries and the sink at once."""

    def __init__(
        self, architecture: DeepseekV4Architecture, layer: int, backend: DSABackend
    ) -> None:
        super().__init__()
        self.schedule = schedule = architecture.layers[layer]
        self.heads, self.head_dim = architecture.num_heads, architecture.head_dim
        self.eps = eps = architecture.norm_eps
        self.backend = backend
        hidden, rank = architecture.hidden_size, architecture.query_rank
        self.ranks = (rank, self.head_dim)
        width, groups = self.heads * self.head_dim, architecture.output_groups
        self.latent = nn.Linear(hidden, sum(self.ranks), bias=False)
        """Rows of the query latent, then of the key."""
        self.query_norm = RMSNorm(rank, eps, round_late=True)
        self.query = nn.Linear(rank, width, bias=False)
        self.key_norm = RMSNorm(self.head_dim, eps, round_late=True)
        self.sink = Sink(self.heads)
        self.out_groups = GroupedLinear(groups, width // groups, architecture.output_rank)
        self.out = nn.Linear(groups * architecture.output_rank, hidden, bias=False)
        ratio, is_csa = schedule.ratio, schedule.kind == "csa"
        self.compressor = (
            Compressor(hidden, self.head_dim, ratio, overlap=is_csa, eps=eps) if ratio else None
        )
        self.indexer = Indexer(architecture, ratio) if is_csa else None

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
        mixed_THD = self.backend.attend(
            q_THD,
            rows_SD[:, None],
            None,
            chosen_TN,
            self.head_dim**-0.5,
            sink_H=self.sink(),
            value_size=self.head_dim,
        )
        # Values carry the rope of their place: turned back, what is left is the distance.
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
