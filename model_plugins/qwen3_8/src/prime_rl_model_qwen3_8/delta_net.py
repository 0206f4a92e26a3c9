"""The Gated DeltaNet layer: short convolution, gated delta rule, gated output.

T tokens, H hidden size, K key heads of size D, V value heads of size E, C convolved channels.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.layers.causal_conv import causal_conv
from prime_rl.layers.norms import rms_norm_late
from prime_rl_model_qwen3_8.architecture import DeltaSizes
from prime_rl_model_qwen3_8.chunks import Chunks
from prime_rl_model_qwen3_8.delta_rule import gated_delta_rule


class Decay(nn.Module):
    """Logarithm of the state's decay, -exp(a_log) * softplus(a + dt_bias). float32 throughout."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.a_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))

    def forward(self, a_TV: Tensor) -> Tensor:
        """float32 [T, V], at most 0."""
        return -self.a_log.exp() * F.softplus(a_TV.float() + self.dt_bias)


class DeltaNet(nn.Module):
    """`in_proj` fuses the rows of q, k, v, the output gate z, the step b and the decay input a."""

    def __init__(self, hidden: int, sizes: DeltaSizes, eps: float) -> None:
        super().__init__()
        self.sizes, self.eps = sizes, eps
        self.parts = (sizes.qkv_width, sizes.value_width, sizes.value_heads, sizes.value_heads)
        self.in_proj = nn.Linear(hidden, sum(self.parts), bias=False)
        self.conv = nn.Parameter(torch.empty(sizes.qkv_width, sizes.conv_kernel))
        self.decay = Decay(sizes.value_heads)
        self.norm = nn.Parameter(torch.empty(sizes.value_dim))
        """A plain factor, shared by all heads."""
        self.out_proj = nn.Linear(sizes.value_width, hidden, bias=False)
        self.gate = torch.sigmoid if sizes.gate == "sigmoid" else F.silu
        self.rule: Callable[..., Tensor] = gated_delta_rule

    def forward(self, x_TH: Tensor, positions_T: Tensor, chunks: Chunks) -> Tensor:
        """[T, H]"""
        sizes = self.sizes
        qkv_TC, z_TX, b_TV, a_TV = self.in_proj(x_TH).split(self.parts, dim=1)
        qkv_TC = F.silu(causal_conv(qkv_TC, self.conv, positions_T))
        keys = sizes.key_heads * sizes.key_dim
        q_TX, k_TX, v_TX = qkv_TC.split((keys, keys, sizes.value_width), dim=1)
        q_TKD, k_TKD = (unit(x.unflatten(1, (sizes.key_heads, -1))) for x in (q_TX, k_TX))
        out_TVE = self.rule(
            q_TKD * sizes.key_dim**-0.5,
            k_TKD,
            v_TX.unflatten(1, (sizes.value_heads, -1)),
            self.decay(a_TV),
            b_TV.float().sigmoid(),
            chunks,
        )
        gates_TVE = self.gate(z_TX.float()).view_as(out_TVE)
        normed_TVE = rms_norm_late(out_TVE, self.norm.float(), self.eps) * gates_TVE
        result: Tensor = self.out_proj(normed_TVE.flatten(1).to(x_TH.dtype))
        return result


def unit(x: Tensor) -> Tensor:
    """x / |x| over the last dimension, float32; 1e-6 under the root as in the kernels."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
