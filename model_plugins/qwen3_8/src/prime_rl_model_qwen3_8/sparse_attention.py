"""Sparse attention: an indexer rates blocks of tokens, attention reads the best and the tail.

T tokens, H hidden size, N query heads, K key and value heads, D head size, J index heads,
I index head size, S complete blocks, B tokens of a block.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.api.backends import AttentionBackend, DSABackend
from prime_rl.api.batch import PackedBatch
from prime_rl.layers.norms import RMSNorm
from prime_rl.layers.rotary import Rotation, rotate
from prime_rl_model_qwen3_8.architecture import SparseSizes
from prime_rl_model_qwen3_8.blocks import Blocks


def rotate_leading(x_TND: Tensor, rotation: Rotation) -> Tensor:
    """Turn the leading numbers of every head, as many as the rotation has; the rest stays."""
    turned, rest = x_TND.tensor_split([rotation.cos_TD.shape[1]], dim=-1)
    return torch.cat((rotate(turned, rotation), rest), dim=-1)


class Indexer(nn.Module):
    """Chooses blocks. Has no gradient: `proj` and both norms are frozen."""

    def __init__(self, hidden: int, sizes: SparseSizes, eps: float, backend: DSABackend) -> None:
        super().__init__()
        self.sizes, self.backend = sizes, backend
        self.proj = nn.Linear(hidden, (sizes.index_heads + 1) * sizes.index_dim, bias=False)
        self.q_norm = RMSNorm(sizes.index_dim, eps, zero_centred=True, round_late=True)
        self.k_norm = RMSNorm(sizes.index_dim, eps, zero_centred=True, round_late=True)

    @torch.no_grad()
    def forward(self, x_TH: Tensor, rotation: Rotation, blocks: Blocks) -> Tensor:
        """int64 [T, min(top, S)] blocks, -1 for none. Every index head weighs the same."""
        fused = self.proj(x_TH).unflatten(1, (-1, self.sizes.index_dim))
        q_TJI, k_TI = fused[:, :-1], fused[:, -1]
        q_TJI = rotate_leading(self.q_norm(q_TJI), rotation)
        mean_SI = k_TI[blocks.rows_SB].float().mean(1).to(x_TH.dtype)
        at_start = Rotation(*(part[blocks.rows_SB[:, 0]] for part in rotation))
        k_SI = rotate_leading(self.k_norm(mean_SI)[:, None], at_start)[:, 0]
        weights_TJ = q_TJI.new_ones(q_TJI.shape[:2])
        return self.backend.select(
            q_TJI, k_SI, weights_TJ, blocks.first_T, blocks.last_T, self.sizes.top_blocks
        )


class SparseAttention(nn.Module):
    """Grouped-query attention with normalised queries and keys and a gate on the output.

    `qkv` has, for every query head, the rows of q and then of its gate; then keys; then values.
    """

    def __init__(
        self,
        hidden: int,
        sizes: SparseSizes,
        eps: float,
        attention: AttentionBackend,
        sparse: DSABackend,
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.attention, self.sparse = attention, sparse
        width = sizes.key_value_heads * sizes.head_dim
        self.parts = (2 * sizes.heads * sizes.head_dim, width, width)
        self.qkv = nn.Linear(hidden, sum(self.parts), bias=False)
        self.q_norm = RMSNorm(sizes.head_dim, eps, zero_centred=True, round_late=True)
        self.k_norm = RMSNorm(sizes.head_dim, eps, zero_centred=True, round_late=True)
        self.out = nn.Linear(sizes.heads * sizes.head_dim, hidden, bias=False)
        self.indexer = Indexer(hidden, sizes, eps, sparse)

    def forward(
        self, x_TH: Tensor, rotation: Rotation, blocks: Blocks | None, batch: PackedBatch
    ) -> Tensor:
        """[T, H]; without `blocks` every token reads all that stands before it."""
        size, scale = self.sizes.head_dim, self.sizes.head_dim**-0.5
        q_TX, k_TX, v_TX = self.qkv(x_TH).split(self.parts, dim=1)
        q_TND, gate_TND = q_TX.unflatten(1, (-1, 2 * size)).chunk(2, dim=-1)
        k_TKD, v_TKD = (x.unflatten(1, (-1, size)) for x in (k_TX, v_TX))
        q_TND = rotate_leading(self.q_norm(q_TND), rotation)
        k_TKD = rotate_leading(self.k_norm(k_TKD), rotation)
        if blocks is None:
            mixed_TND = self.attention.attend(
                q_TND, k_TKD, v_TKD, batch.cu_seqlens, batch.lengths, scale
            )
        else:
            rows_TX = blocks.rows_of(self.indexer(x_TH, rotation, blocks))
            mixed_TND = self.sparse.attend(q_TND, k_TKD, v_TKD, rows_TX, scale)
        result: Tensor = self.out((mixed_TND * gate_TND.sigmoid()).flatten(1))
        return result


def needs_blocks(sizes: SparseSizes | None, batch: PackedBatch) -> bool:
    """Whether some document is so long that its last token cannot read all of it."""
    return sizes is not None and batch.max_length >= sizes.budget + sizes.block
