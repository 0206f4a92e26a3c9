"""One layer's arithmetic for few tokens, where the number of operations is the cost.

The same sums as model.py, with norms and residuals in fewer operations. T new tokens, R requests, H
hidden size, N query heads, K key heads, M = N + K, D head size, I intermediate size, B = slots * K,
G = N / K, L cached positions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.layers.mlp import GatedMLP
from prime_rl.layers.norms import rms_norm
from prime_rl_model_qwen3.architecture import Qwen3Architecture
from prime_rl_model_qwen3.model import Block


class AttentionWeights(NamedTuple):
    """A block's weights up to its MLP, laid out for LayerMath. Made anew when weights change."""

    input_norm: Tensor | None
    """None: part of qkv."""
    qkv: Tensor
    """[H, (N + 2K) * D]"""
    head_norm: Tensor
    """[M, D]"""
    out: Tensor
    """[N * D, H]"""
    mlp_norm: Tensor | None
    """None: part of the MLP's first matrix."""


class MLPWeights(NamedTuple):
    """A dense MLP's weights."""

    gate_up: Tensor
    """[H, 2I]"""
    down: Tensor
    """[I, H]"""


class LayerMath:
    """What every layer computes with its weights, which are arguments.

    `copies` transposes the matrices in memory: with few rows, a CPU multiplies by them up to three
    times faster than by transposed views. In float32 the copies take the weights of the norms
    before them in.
    """

    def __init__(
        self,
        architecture: Qwen3Architecture,
        device: torch.device,
        dtype: torch.dtype,
        copies: bool,
    ) -> None:
        self.copies = copies
        self.folds = copies and dtype == torch.float32
        self.heads, self.key_heads = architecture.num_heads, architecture.num_key_value_heads
        self.head_dim = architecture.head_dim
        self.scale = self.head_dim**-0.5
        eps = architecture.norm_eps
        self.norm = DecodeNorm(architecture.hidden_size, eps, device, dtype)
        self.head_norm = DecodeNorm(self.head_dim, eps, device, dtype)

    def attention_weights(self, block: Block) -> AttentionWeights:
        """Lay out a block's attention."""
        attention = block.attention
        query_ND = attention.q_norm.weight.expand(self.heads, -1)
        key_KD = attention.k_norm.weight.expand(self.key_heads, -1)
        input_norm = self.norm.prepare(block.input_norm.weight)
        folds_mlp = self.folds and isinstance(block.mlp, GatedMLP)
        return AttentionWeights(
            None if self.folds else input_norm,
            self._matrix(attention.qkv, input_norm),
            self.head_norm.prepare(torch.cat((query_ND, key_KD))),
            self._matrix(attention.out),
            None if folds_mlp else self.norm.prepare(block.mlp_norm.weight),
        )

    def mlp_weights(self, block: Block) -> MLPWeights | None:
        """Lay out a block's MLP; None when it has experts."""
        if not isinstance(block.mlp, GatedMLP):
            return None
        norm = self.norm.prepare(block.mlp_norm.weight)
        return MLPWeights(self._matrix(block.mlp.gate_up, norm), self._matrix(block.mlp.down))

    def _matrix(self, linear: nn.Linear, norm: Tensor | None = None) -> Tensor:
        """The weight as [in, out], with the norm before it where that is folded in."""
        view = linear.weight.detach().t()
        if norm is not None and self.folds:
            return norm[:, None] * view
        return view.contiguous() if self.copies else view

    def _normal(self, x_TH: Tensor, weight: Tensor | None) -> Tensor:
        """x normalised, with the weight unless the next matrix has it."""
        return self.norm.without_weight(x_TH) if weight is None else self.norm(x_TH, weight)

    def project(
        self,
        x_TH: Tensor,
        cos_T1D: Tensor,
        sin_T1D: Tensor,
        weights: AttentionWeights,
        bias: Tensor | None = None,
    ) -> Tensor:
        """[T, N + 2K, D]: queries, keys, values; queries and keys normalised and rotated."""
        fused = torch.mm(self._normal(x_TH, weights.input_norm), weights.qkv)
        if bias is not None:
            fused = fused.add_(bias)
        fused = fused.view(-1, self.heads + 2 * self.key_heads, self.head_dim)
        both_TMD = fused.narrow(1, 0, self.heads + self.key_heads)
        normal_TMD = self.head_norm(both_TMD, weights.head_norm)
        swapped_TMD = normal_TMD.roll(self.head_dim // 2, -1)
        torch.addcmul(normal_TMD.mul_(cos_T1D), swapped_TMD, sin_T1D, out=both_TMD)
        return fused

    def store(self, fused: Tensor, places: Tensor, slots_T: Tensor, positions_T: Tensor) -> None:
        """Write keys and values into the cache; `places` is its view [slots, L, 2, K, D]."""
        kv = fused.narrow(1, self.heads, 2 * self.key_heads)
        kv_T2KD = kv.view(-1, 2, self.key_heads, self.head_dim)
        places.index_put_((slots_T, positions_T), kv_T2KD)

    def attend(
        self, q_RND: Tensor, mask_BGL: Tensor, keys_BLD: Tensor, values_BLD: Tensor
    ) -> Tensor:
        """[R, N * D] of one query for each of the slots that keys and values are of."""
        q_BGD = q_RND.reshape(-1, self.heads // self.key_heads, self.head_dim)
        scores_BGL = torch.baddbmm(mask_BGL, q_BGD, keys_BLD.transpose(1, 2), alpha=self.scale)
        mixed_BGD = torch.bmm(scores_BGL.softmax(-1), values_BLD)
        return mixed_BGD.view(-1, self.heads * self.head_dim)

    def add_attention(
        self, x_TH: Tensor, mixed_TF: Tensor, weights: AttentionWeights, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """(x plus the heads' outputs, projected; its normalised form for the MLP). Changes x."""
        x_TH.addmm_(mixed_TF, weights.out)
        if bias is not None:
            x_TH.add_(bias)
        return x_TH, self._normal(x_TH, weights.mlp_norm)

    def add_mlp(self, x_TH: Tensor, normal_TH: Tensor, weights: MLPWeights) -> Tensor:
        """x plus the dense MLP's result. Changes x."""
        gate_TI, up_TI = torch.mm(normal_TH, weights.gate_up).chunk(2, dim=-1)
        return x_TH.addmm_(F.silu(gate_TI).mul_(up_TI), weights.down)


class DecodeNorm:
    """rms_norm over a last dimension of `size` with prepared weights.

    In float32: x w sqrt(H) / hypot(|x|, sqrt(H eps)), four operations instead of ten.
    """

    def __init__(self, size: int, eps: float, device: torch.device, dtype: torch.dtype) -> None:
        self.size, self.eps = size, eps
        self.is_plain = dtype == torch.float32
        # As a tensor: a Python number would be wrapped into one at every call.
        self.least = torch.tensor([(size * eps) ** 0.5], device=device)

    def prepare(self, weight: Tensor) -> Tensor:
        """The weight [.., H] as calls take it."""
        return weight.detach() * self.size**0.5 if self.is_plain else weight.detach()

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.is_plain:
            return rms_norm(x, weight, self.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * weight).div_(torch.hypot(length, self.least))

    def without_weight(self, x: Tensor) -> Tensor:
        """What, times the prepared weight, is the norm (float32 only)."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return x.div(torch.hypot(length, self.least))
