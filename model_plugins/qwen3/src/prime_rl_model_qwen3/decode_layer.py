"""One layer's arithmetic for few tokens, where the number of operations is the cost.

The same sums as model.py, with norms and residuals in fewer operations. T new tokens, H hidden
size, N query heads, K key heads, D head size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.layers.mlp import GatedMLP
from prime_rl.layers.norms import rms_norm
from prime_rl_model_qwen3.model import Block


class DecodeLayer:
    """A block's weights laid out for the calls below. Made anew when weights change.

    `copies` transposes the matrices in memory: with few rows, a CPU multiplies by them up to three
    times faster than by transposed views.
    """

    def __init__(self, block: Block, heads: int, key_heads: int, copies: bool) -> None:
        attention = block.attention
        self.block = block
        self.backend = attention.backend
        self.head_dim = attention.head_dim
        self.rotated_heads = heads + key_heads
        self.input_norm = DecodeNorm(block.input_norm.weight, block.input_norm.eps)
        self.mlp_norm = DecodeNorm(block.mlp_norm.weight, block.mlp_norm.eps)
        self.qkv, self.qkv_bias = _transposed(attention.qkv, copies), attention.qkv.bias
        self.out, self.out_bias = _transposed(attention.out, copies), attention.out.bias
        query_ND = attention.q_norm.weight.expand(heads, -1)
        key_KD = attention.k_norm.weight.expand(key_heads, -1)
        self.head_norm = DecodeNorm(torch.cat((query_ND, key_KD)), attention.q_norm.eps)
        self.gate_up: Tensor | None = None
        if isinstance(block.mlp, GatedMLP):
            self.gate_up = _transposed(block.mlp.gate_up, copies)
            self.down = _transposed(block.mlp.down, copies)

    def project(self, x_TH: Tensor, cos_T1D: Tensor, sin_T1D: Tensor) -> Tensor:
        """[T, N + 2K, D]: queries, keys, values; queries and keys normalised and rotated."""
        fused = torch.mm(self.input_norm(x_TH), self.qkv)
        if self.qkv_bias is not None:
            fused = fused.add_(self.qkv_bias)
        fused = fused.view(fused.shape[0], -1, self.head_dim)
        both = fused[:, : self.rotated_heads]
        normal = self.head_norm(both)
        swapped = normal.roll(self.head_dim // 2, -1)
        torch.addcmul(normal.mul_(cos_T1D), swapped, sin_T1D, out=both)
        return fused

    def finish(self, x_TH: Tensor, mixed_TF: Tensor) -> Tensor:
        """The layer's result from its input and the heads' outputs [T, N * D]."""
        x_TH = torch.addmm(x_TH, mixed_TF, self.out)
        if self.out_bias is not None:
            x_TH = x_TH + self.out_bias
        normal_TH = self.mlp_norm(x_TH)
        if self.gate_up is None:
            return x_TH + self.block.feed_forward(normal_TH)
        gate_TI, up_TI = torch.mm(normal_TH, self.gate_up).chunk(2, dim=-1)
        return torch.addmm(x_TH, F.silu(gate_TI).mul_(up_TI), self.down)


class DecodeNorm:
    """rms_norm over the last dimension with prepared constants.

    In float32: x w sqrt(H) / hypot(|x|, sqrt(H eps)), four operations instead of ten.
    """

    def __init__(self, weight: Tensor, eps: float) -> None:
        size = weight.shape[-1]
        self.weight, self.eps = weight.detach(), eps
        self.scaled = self.weight * size**0.5
        # As a tensor: a Python number would be wrapped into one at every call.
        self.least = self.weight.new_tensor([(size * eps) ** 0.5])

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return rms_norm(x, self.weight, self.eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x * self.scaled).div_(torch.hypot(length, self.least))


def _transposed(linear: nn.Linear, copies: bool) -> Tensor:
    """The weight as [in, out]."""
    view = linear.weight.detach().t()
    return view.contiguous() if copies else view
