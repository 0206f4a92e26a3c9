"""The Qwen3 forward pass over packed documents.

T tokens, H hidden size, N query heads, K key and value heads, M = N + K, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.api.backends import AttentionBackend, MoEBackend
from prime_rl.api.batch import PackedBatch
from prime_rl.api.model import Kernels
from prime_rl.layers.mlp import GatedMLP
from prime_rl.layers.moe import MoEBlock, RouterSettings, routes_by_layer
from prime_rl.layers.norms import RMSNorm, rms_norm
from prime_rl.layers.rotary import Rotary, Rotation, rotate
from prime_rl.layers.start_values import fill_normal
from prime_rl_model_qwen3.architecture import Qwen3Architecture


class Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, architecture: Qwen3Architecture, backend: AttentionBackend) -> None:
        super().__init__()
        self.heads = architecture.num_heads
        self.key_value_heads = architecture.num_key_value_heads
        self.head_dim = dim = architecture.head_dim
        self.backend = backend
        fused = (self.heads + 2 * self.key_value_heads) * dim
        bias = architecture.attention_bias
        self.qkv = nn.Linear(architecture.hidden_size, fused, bias=bias)
        self.q_norm = RMSNorm(dim, architecture.norm_eps)
        self.k_norm = RMSNorm(dim, architecture.norm_eps)
        self.out = nn.Linear(self.heads * dim, architecture.hidden_size, bias=bias)

    def forward(self, x_TH: Tensor, rotation: Rotation, batch: PackedBatch) -> Tensor:
        q_TND, k_TKD, v_TKD = self.project(x_TH, rotation)
        mixed_TND = self.backend.attend(
            q_TND, k_TKD, v_TKD, batch.cu_seqlens, batch.lengths, self.head_dim**-0.5
        )
        result: Tensor = self.out(mixed_TND.flatten(1))
        return result

    def project(self, x_TH: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the first two normalised and rotated."""
        heads = (self.heads, self.key_value_heads)
        fused = self.qkv(x_TH).unflatten(1, (-1, self.head_dim))
        both_TMD, v_TKD = fused.split((sum(heads), self.key_value_heads), dim=1)
        # Queries and keys in one go: half the operations of doing one after the other.
        weights = (self.q_norm.weight, self.k_norm.weight)
        weight_MD = torch.cat([w.expand(n, -1) for w, n in zip(weights, heads, strict=True)])
        both_TMD = rotate(rms_norm(both_TMD, weight_MD, self.q_norm.eps), rotation)
        q_TND, k_TKD = both_TMD.split(heads, dim=1)
        return q_TND, k_TKD, v_TKD


class Block(nn.Module):
    """One layer: attention and MLP, each on the normalised residual stream."""

    def __init__(self, architecture: Qwen3Architecture, layer: int, kernels: Kernels) -> None:
        super().__init__()
        hidden, eps = architecture.hidden_size, architecture.norm_eps
        self.input_norm = RMSNorm(hidden, eps)
        self.attention = Attention(architecture, kernels.attention)
        self.mlp_norm = RMSNorm(hidden, eps)
        self.mlp: nn.Module
        if layer in architecture.moe_layers:
            self.mlp = _make_experts(architecture, layer, kernels.moe[layer])
        else:
            self.mlp = GatedMLP(hidden, architecture.intermediate_size)

    def forward(
        self, x_TH: Tensor, rotation: Rotation, batch: PackedBatch, routes_Tk: Tensor | None
    ) -> Tensor:
        x_TH = x_TH + self.attention(self.input_norm(x_TH), rotation, batch)
        return x_TH + self.feed_forward(self.mlp_norm(x_TH), routes_Tk)

    def feed_forward(self, x_TH: Tensor, routes_Tk: Tensor | None = None) -> Tensor:
        """The MLP or the experts, on normalised input; `routes` as the experts' router takes."""
        is_moe = isinstance(self.mlp, MoEBlock)
        result: Tensor = self.mlp(x_TH, routes_Tk) if is_moe else self.mlp(x_TH)
        return result


def _make_experts(architecture: Qwen3Architecture, layer: int, backend: MoEBackend) -> MoEBlock:
    experts = architecture.experts
    assert experts is not None
    router = RouterSettings(
        experts=experts.count,
        per_token=experts.per_token,
        scoring="softmax",
        normalise=experts.normalise_weights,
    )
    return MoEBlock(architecture.hidden_size, experts.intermediate_size, router, layer, backend)


class Qwen3Module(nn.Module):
    """Embedding, blocks, final norm; the head is kept here and applied by core."""

    def __init__(self, architecture: Qwen3Architecture, kernels: Kernels) -> None:
        super().__init__()
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        self.initializer_range = architecture.initializer_range
        self.experts_per_token = architecture.experts.per_token if architecture.experts else 0
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(architecture.rotary)
        self.layers = nn.ModuleList(
            Block(architecture, layer, kernels) for layer in range(architecture.num_layers)
        )
        self.norm = RMSNorm(hidden, architecture.norm_eps)
        tied = architecture.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, batch: PackedBatch) -> Tensor:
        x_TH = self.embed_tokens(batch.input_ids)
        rotation = self.rotary(batch.positions, x_TH.dtype)
        routes = routes_by_layer(batch, len(self.layers), self.experts_per_token)
        for block, routes_Tk in zip(self.layers, routes, strict=True):
            x_TH = block(x_TH, rotation, batch, routes_Tk)
        final: Tensor = self.norm(x_TH)
        return final


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Normal weights with the config's `initializer_range`, unit norms, zero biases."""
    spread = module.initializer_range
    assert isinstance(spread, float)
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            fill_normal(parameter, spread, generator)
