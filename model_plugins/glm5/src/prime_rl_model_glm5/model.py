"""The GLM-5 forward pass over packed documents.

T tokens, H hidden size, S selected keys, k experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.api.backends import MoEBackend
from prime_rl.api.batch import PackedBatch
from prime_rl.api.model import Kernels
from prime_rl.layers.float8_linear import Float8Experts
from prime_rl.layers.mlp import GatedMLP
from prime_rl.layers.moe import MoEBlock, RouterSettings, routes_by_layer
from prime_rl.layers.norms import RMSNorm
from prime_rl.layers.rotary import PairRotation, Rotary
from prime_rl.layers.start_values import fill_normal
from prime_rl_model_glm5.architecture import Glm5Architecture
from prime_rl_model_glm5.attention import Attention
from prime_rl_model_glm5.indexer import Visible
from prime_rl_model_glm5.numerics import Numerics


class Block(nn.Module):
    """One layer: attention and MLP or experts, each on the normalised residual stream."""

    def __init__(
        self, architecture: Glm5Architecture, layer: int, kernels: Kernels, numerics: Numerics
    ) -> None:
        super().__init__()
        hidden, eps = architecture.hidden_size, architecture.norm_eps
        assert kernels.dsa is not None
        self.input_norm = RMSNorm(hidden, eps, round_late=True)
        self.attention = Attention(architecture, layer, kernels.dsa, numerics)
        self.mlp_norm = RMSNorm(hidden, eps, round_late=True)
        self.mlp: nn.Module
        if layer in architecture.moe_layers:
            self.mlp = _make_experts(architecture, layer, kernels.moe[layer], numerics)
        else:
            inner, scales = architecture.intermediate_size, numerics.linear_scales
            self.mlp = GatedMLP(hidden, inner, scales=scales)

    def forward(
        self,
        x_TH: Tensor,
        rotation: PairRotation,
        visible: Visible,
        rows_TS: Tensor | None,
        routes_Tk: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """(residual stream [T, H], rows of the keys attended to, for the layers that reuse them)."""
        mixed_TH, rows_TS = self.attention(self.input_norm(x_TH), rotation, visible, rows_TS)
        x_TH = x_TH + mixed_TH
        normal_TH = self.mlp_norm(x_TH)
        is_moe = isinstance(self.mlp, MoEBlock)
        fed_TH = self.mlp(normal_TH, routes_Tk) if is_moe else self.mlp(normal_TH)
        return x_TH + fed_TH, rows_TS


def _make_experts(
    architecture: Glm5Architecture, layer: int, backend: MoEBackend, numerics: Numerics
) -> MoEBlock:
    hidden, experts = architecture.hidden_size, architecture.experts
    scales = numerics.linear_scales
    if scales is not None:
        backend = Float8Experts(backend, scales)
    settings = RouterSettings(
        experts=experts.count,
        per_token=experts.per_token,
        scoring="sigmoid",
        normalise=experts.normalise_weights,
        scale=experts.scale,
        has_selection_bias=True,
        groups=experts.groups,
        top_groups=experts.top_groups,
    )
    shared = GatedMLP(hidden, experts.intermediate_size * experts.shared_count, scales=scales)
    block = MoEBlock(hidden, experts.intermediate_size, settings, layer, backend, shared=shared)
    block.router.float()  # logits in float32 whatever the rest computes in
    return block


class Glm5Module(nn.Module):
    """Embedding, blocks, final norm; the head is kept here and applied by core."""

    def __init__(
        self, architecture: Glm5Architecture, kernels: Kernels, numerics: Numerics
    ) -> None:
        super().__init__()
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        self.initializer_range = architecture.initializer_range
        self.experts_per_token = architecture.experts.per_token
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.rotary = Rotary(architecture.rotary)
        self.layers = nn.ModuleList(
            Block(architecture, layer, kernels, numerics)
            for layer in range(architecture.num_layers)
        )
        self.norm = RMSNorm(hidden, architecture.norm_eps, round_late=True)
        tied = architecture.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, batch: PackedBatch) -> Tensor:
        x_TH = self.embed_tokens(batch.input_ids)
        rotation = self.rotary.pairs(batch.positions, x_TH.dtype)
        first_T = batch.document_starts()
        visible = Visible(first_T, torch.arange(1, len(first_T) + 1, device=first_T.device))
        routes = routes_by_layer(batch, len(self.layers), self.experts_per_token)
        rows_TS: Tensor | None = None
        for block, routes_Tk in zip(self.layers, routes, strict=True):
            x_TH, rows_TS = block(x_TH, rotation, visible, rows_TS, routes_Tk)
        final: Tensor = self.norm(x_TH)
        return final


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Normal weights with the config's `initializer_range`, unit norms, zero biases."""
    spread = module.initializer_range
    assert isinstance(spread, float)
    for buffer in module.buffers():
        buffer.zero_()
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            fill_normal(parameter, spread, generator)
