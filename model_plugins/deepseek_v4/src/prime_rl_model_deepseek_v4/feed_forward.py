"""The experts of a layer: chosen by a router, or by the token's id in the first layers.

T tokens, k experts per token, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from prime_rl.api.backends import ExpertActivation, MoEBackend
from prime_rl.layers.float8_linear import Float8Experts
from prime_rl.layers.mlp import GatedMLP
from prime_rl.layers.moe import MoEBlock, RouterSettings
from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture
from prime_rl_model_deepseek_v4.numerics import PLAIN, Numerics


class HashMoEBlock(MoEBlock):
    """Experts are fixed by the token's id; their weights are the router's live scores.

    The table is a buffer, never a parameter: training does not change it.
    """

    def __init__(self, vocabulary: int, *arguments: object, **settings: object) -> None:
        super().__init__(*arguments, **settings)  # type: ignore[arg-type]
        per_token = self.router.settings.per_token
        self.token_experts: Tensor
        table_Vk = torch.zeros(vocabulary, per_token, dtype=torch.int64)
        self.register_buffer("token_experts", table_Vk)

    def fixed_routes(self, input_ids: Tensor, replayed_Tk: Tensor | None) -> Tensor:
        """The experts of these tokens [T, k]; recorded ones stand where there are."""
        routes_Tk = self.token_experts[input_ids]
        if replayed_Tk is None:
            return routes_Tk
        return torch.where(replayed_Tk[:, :1] >= 0, replayed_Tk, routes_Tk)


def make_experts(
    architecture: DeepseekV4Architecture,
    layer: int,
    backend: MoEBackend,
    numerics: Numerics = PLAIN,
) -> MoEBlock:
    """The MoE block of a layer, the shared expert included."""
    experts, hidden = architecture.experts, architecture.hidden_size
    is_hashed = layer in architecture.hash_layers
    activation = ExpertActivation("gated_silu", experts.limit)
    router = RouterSettings(
        experts=experts.count,
        per_token=experts.per_token,
        scoring="sqrt_softplus",
        normalise=True,
        scale=experts.scale,
        has_selection_bias=not is_hashed,
    )
    width, scales = experts.intermediate_size, numerics.linear_scales
    if scales is not None:
        backend = Float8Experts(backend, scales)
    shared = GatedMLP(hidden, width, activation, scales)
    arguments = (hidden, width, router, layer, backend, activation, shared)
    if is_hashed:
        return HashMoEBlock(architecture.vocab_size, *arguments)
    return MoEBlock(*arguments)
