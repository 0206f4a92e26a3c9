"""The Nemotron-H forward pass over packed documents: every layer is x + mixer(norm(x)).

T tokens, H hidden size, k experts per token.
"""

from __future__ import annotations

from torch import Tensor, nn

from prime_rl.api.backends import AttentionBackend, MoEBackend
from prime_rl.api.batch import PackedBatch
from prime_rl.api.model import Kernels
from prime_rl.layers.moe import routes_by_layer
from prime_rl.layers.norms import RMSNorm
from prime_rl_model_nemotron_h.architecture import NemotronHArchitecture
from prime_rl_model_nemotron_h.attention import Attention
from prime_rl_model_nemotron_h.chunks import Chunks, make_chunks
from prime_rl_model_nemotron_h.feed_forward import ExpertLayer, SquaredReluMLP
from prime_rl_model_nemotron_h.mamba import Mamba


class Block(nn.Module):
    """A norm; subclasses add the one mixer of their kind."""

    def __init__(self, architecture: NemotronHArchitecture) -> None:
        super().__init__()
        self.norm = RMSNorm(architecture.hidden_size, architecture.norm_eps, round_late=True)

    def forward(
        self, x_TH: Tensor, batch: PackedBatch, chunks: Chunks, routes_Tk: Tensor | None
    ) -> Tensor:
        return x_TH + self.mix(self.norm(x_TH), batch, chunks, routes_Tk)

    def mix(
        self, x_TH: Tensor, batch: PackedBatch, chunks: Chunks, routes_Tk: Tensor | None
    ) -> Tensor:
        """The mixer on normalised input."""
        raise NotImplementedError


class MambaBlock(Block):
    """M"""

    def __init__(self, architecture: NemotronHArchitecture) -> None:
        super().__init__(architecture)
        assert architecture.mamba is not None
        self.mamba = Mamba(architecture.hidden_size, architecture.mamba, architecture.norm_eps)

    def mix(
        self, x_TH: Tensor, batch: PackedBatch, chunks: Chunks, routes_Tk: Tensor | None
    ) -> Tensor:
        result: Tensor = self.mamba(x_TH, batch, chunks)
        return result


class AttentionBlock(Block):
    """*"""

    def __init__(self, architecture: NemotronHArchitecture, backend: AttentionBackend) -> None:
        super().__init__(architecture)
        assert architecture.attention is not None
        self.attention = Attention(architecture.hidden_size, architecture.attention, backend)

    def mix(
        self, x_TH: Tensor, batch: PackedBatch, chunks: Chunks, routes_Tk: Tensor | None
    ) -> Tensor:
        result: Tensor = self.attention(x_TH, batch)
        return result


class DenseBlock(Block):
    """-"""

    def __init__(self, architecture: NemotronHArchitecture) -> None:
        super().__init__(architecture)
        assert architecture.mlp_size is not None
        self.mlp = SquaredReluMLP(architecture.hidden_size, architecture.mlp_size)

    def mix(
        self, x_TH: Tensor, batch: PackedBatch, chunks: Chunks, routes_Tk: Tensor | None
    ) -> Tensor:
        result: Tensor = self.mlp(x_TH)
        return result


class ExpertBlock(Block):
    """E"""

    def __init__(
        self, architecture: NemotronHArchitecture, layer: int, backend: MoEBackend
    ) -> None:
        super().__init__(architecture)
        assert architecture.experts is not None
        self.mlp = ExpertLayer(architecture.hidden_size, architecture.experts, layer, backend)

    def mix(
        self, x_TH: Tensor, batch: PackedBatch, chunks: Chunks, routes_Tk: Tensor | None
    ) -> Tensor:
        result: Tensor = self.mlp(x_TH, routes_Tk)
        return result


def make_block(architecture: NemotronHArchitecture, layer: int, kernels: Kernels) -> Block:
    """The block of a layer by its global number, which also picks its MoE back end."""
    match architecture.kinds[layer]:
        case "mamba":
            return MambaBlock(architecture)
        case "attention":
            return AttentionBlock(architecture, kernels.attention)
        case "mlp":
            return DenseBlock(architecture)
        case "moe":
            return ExpertBlock(architecture, layer, kernels.moe[layer])


class NemotronHModule(nn.Module):
    """Embedding, blocks, final norm; the head is kept here and applied by core."""

    def __init__(self, architecture: NemotronHArchitecture, kernels: Kernels) -> None:
        super().__init__()
        self.architecture = architecture
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            make_block(architecture, layer, kernels) for layer in range(architecture.num_layers)
        )
        self.norm = RMSNorm(hidden, architecture.norm_eps, round_late=True)
        self.lm_head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, batch: PackedBatch) -> Tensor:
        architecture = self.architecture
        x_TH = self.embed_tokens(batch.input_ids)
        chunks = make_chunks(batch.positions, architecture.mamba.chunk if architecture.mamba else 1)
        per_token = architecture.experts.per_token if architecture.experts else 0
        routes = routes_by_layer(batch, architecture.num_layers, per_token)
        for block, routes_Tk in zip(self.layers, routes, strict=True):
            x_TH = block(x_TH, batch, chunks, routes_Tk)
        final: Tensor = self.norm(x_TH)
        return final
