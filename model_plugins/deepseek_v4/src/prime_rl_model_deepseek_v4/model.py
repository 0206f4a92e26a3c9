"""The DeepSeek V4 forward pass over packed documents.

T tokens, N residual streams, D hidden size, k experts per token.
"""

from __future__ import annotations

from torch import Tensor, nn

from prime_rl.api.batch import PackedBatch
from prime_rl.api.model import Kernels
from prime_rl.layers.moe import routes_by_layer
from prime_rl.layers.norms import RMSNorm
from prime_rl.layers.rotary import Rotary
from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture
from prime_rl_model_deepseek_v4.attention import Attention, Sink
from prime_rl_model_deepseek_v4.compressor import PositionBias
from prime_rl_model_deepseek_v4.feed_forward import HashMoEBlock, make_experts
from prime_rl_model_deepseek_v4.hyper_connection import (
    HyperConnection,
    ReadNorm,
    StreamHead,
    read,
    write,
)
from prime_rl_model_deepseek_v4.numerics import Numerics
from prime_rl_model_deepseek_v4.places import Places, make_places


class Block(nn.Module):
    """One layer: attention and experts, each between a read and a write of the streams."""

    def __init__(
        self,
        architecture: DeepseekV4Architecture,
        layer: int,
        kernels: Kernels,
        numerics: Numerics,
    ) -> None:
        super().__init__()
        assert kernels.dsa is not None
        hidden, eps = architecture.hidden_size, architecture.norm_eps
        self.attention_maps = HyperConnection(hidden, architecture.hyper, eps)
        self.attention_norm = ReadNorm(hidden, eps)
        self.attention = Attention(architecture, layer, kernels.dsa, numerics)
        self.mlp_maps = HyperConnection(hidden, architecture.hyper, eps)
        self.mlp_norm = ReadNorm(hidden, eps)
        self.mlp = make_experts(architecture, layer, kernels.moe[layer], numerics)

    def forward(self, streams_TND: Tensor, places: Places, routes_Tk: Tensor | None) -> Tensor:
        """The streams behind the layer; `routes` as the router takes them."""
        pre_TN, post_TN, comb_TNN = self.attention_maps(streams_TND)
        y_TD = self.attention(self.attention_norm(streams_TND, pre_TN), places)
        streams_TND = write(streams_TND, y_TD, post_TN, comb_TNN)
        pre_TN, post_TN, comb_TNN = self.mlp_maps(streams_TND)
        if isinstance(self.mlp, HashMoEBlock):
            routes_Tk = self.mlp.fixed_routes(places.input_ids, routes_Tk)
        y_TD = self.mlp(self.mlp_norm(streams_TND, pre_TN), routes_Tk)
        return write(streams_TND, y_TD, post_TN, comb_TNN)


class DeepseekV4Module(nn.Module):
    """Embedding, blocks, final read and norm; the head is kept here and applied by core."""

    def __init__(
        self, architecture: DeepseekV4Architecture, kernels: Kernels, numerics: Numerics
    ) -> None:
        super().__init__()
        self.architecture = architecture
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.main_rotary = Rotary(architecture.main_rotary)
        self.compress_rotary = Rotary(architecture.compress_rotary)
        self.layers = nn.ModuleList(
            Block(architecture, layer, kernels, numerics)
            for layer in range(architecture.num_layers)
        )
        self.stream_head = StreamHead(hidden, architecture.hyper, architecture.norm_eps)
        self.norm = RMSNorm(hidden, architecture.norm_eps, round_late=True)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, batch: PackedBatch) -> Tensor:
        architecture = self.architecture
        x_TD = self.embed_tokens(batch.input_ids)
        places = make_places(batch, architecture, self.main_rotary, self.compress_rotary)
        routes = routes_by_layer(batch, len(self.layers), architecture.experts.per_token)
        streams_TND = x_TD[:, None].repeat(1, architecture.hyper.streams, 1)
        for block, routes_Tk in zip(self.layers, routes, strict=True):
            streams_TND = block(streams_TND, places, routes_Tk)
        mixed_TD = read(streams_TND, self.stream_head(streams_TND))
        final: Tensor = self.norm(mixed_TD.to(x_TD.dtype))
        return final


def float32_modules(module: nn.Module) -> list[nn.Module]:
    """Maps of the streams, sinks and position biases."""
    kinds = (HyperConnection, StreamHead, Sink, PositionBias)
    return [part for part in module.modules() if isinstance(part, kinds)]
