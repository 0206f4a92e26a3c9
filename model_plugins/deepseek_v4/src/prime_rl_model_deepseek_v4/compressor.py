"""Compression of windows of tokens into one key row each, in float32 to the end.

T tokens, C entries, M tokens per entry, D entry size, O = 2 with overlapping windows, else 1.

An entry pools the M tokens of its window; with overlap also the M tokens before it, through other
columns of the projections (the first D for a token in the window before, the last D for one in the
window itself):

    K = x Wkv^T;  G = x Wgate^T + bias[position mod M];  c = sum over rows of softmax(G) * K
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.layers.norms import RMSNorm, rms_norm_late
from prime_rl_model_deepseek_v4.places import Entries
from prime_rl_model_deepseek_v4.rope import rotate_tail


class PositionBias(nn.Module):
    """What a token's place in its window adds to its gate: float32 [M, O D]."""

    def __init__(self, ratio: int, width: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(ratio, width, dtype=torch.float32))

    def forward(self, empty: Tensor) -> Tensor:
        """`empty` is not read, see `Model.float32_modules`."""
        # Never the parameter itself, which a sharded module takes away after its forward.
        return self.bias.float().clone()


class Compressor(nn.Module):
    """Normalised and rotated entries of one layer. Its products are float32, whatever x is."""

    def __init__(self, hidden: int, size: int, ratio: int, overlap: bool, eps: float) -> None:
        super().__init__()
        self.size = size
        self.overlap = overlap
        width = size * (2 if overlap else 1)
        self.project = nn.Linear(hidden, 2 * width, bias=False)
        """Rows of Wkv, then those of Wgate."""
        self.position_bias = PositionBias(ratio, width)
        self.norm = RMSNorm(size, eps)

    def forward(self, x_TH: Tensor, entries: Entries) -> Tensor:
        """[C, D] in x's dtype; C may be 0."""
        both = F.linear(x_TH.float(), self.project.weight.float())
        key, gate = both.chunk(2, dim=-1)
        pooled_CD = self._pool(key, gate, self.position_bias(x_TH.new_empty(0)), entries)
        normal_CD = rms_norm_late(pooled_CD, self.norm.weight, self.norm.eps)
        return rotate_tail(normal_CD, entries.rotation).to(x_TH.dtype)

    def _pool(self, key: Tensor, gate: Tensor, bias: Tensor, entries: Entries) -> Tensor:
        """key and gate [T, O D], bias [M, O D]."""
        own_CM = entries.tokens_CM
        if not self.overlap:
            return _pooled(_take(key, own_CM), _take(gate, own_CM) + bias)
        # A document's first window has none before it. What stands there instead is its own, so
        # that nothing of another document is even multiplied by zero.
        is_first_C11 = entries.is_first_C[:, None, None]
        before_CM = own_CM - own_CM.shape[1] * ~is_first_C11[..., 0]
        size = self.size
        earlier_gate = _take(gate[:, :size], before_CM) + bias[:, :size]
        earlier_gate = earlier_gate.masked_fill(is_first_C11, -torch.inf)
        own_gate = _take(gate[:, size:], own_CM) + bias[:, size:]
        rows = torch.cat((_take(key[:, :size], before_CM), _take(key[:, size:], own_CM)), dim=1)
        return _pooled(rows, torch.cat((earlier_gate, own_gate), dim=1))


def _take(x_TD: Tensor, rows_CM: Tensor) -> Tensor:
    return x_TD.index_select(0, rows_CM.flatten()).unflatten(0, rows_CM.shape)


def _pooled(key_CMD: Tensor, gate_CMD: Tensor) -> Tensor:
    return (gate_CMD.softmax(dim=1) * key_CMD).sum(dim=1)
