"""The Qwen3.8 forward pass over packed documents.

T tokens, H hidden size, W = streams * H, k experts per token, G n-gram heads of D numbers.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from prime_rl.api.batch import PackedBatch
from prime_rl.api.model import Kernels
from prime_rl.layers.mlp import GatedMLP
from prime_rl.layers.moe import MoEBlock, RouterSettings, routes_by_layer
from prime_rl.layers.rotary import Rotary, Rotation
from prime_rl_model_qwen3_8.architecture import Qwen38Architecture
from prime_rl_model_qwen3_8.blocks import Blocks, cut_blocks
from prime_rl_model_qwen3_8.chunks import Chunks, cut_chunks
from prime_rl_model_qwen3_8.delta_net import DeltaNet
from prime_rl_model_qwen3_8.ngram import NgramInjection, NgramLookup
from prime_rl_model_qwen3_8.sparse_attention import SparseAttention, needs_blocks
from prime_rl_model_qwen3_8.streams import StreamMixer, write


class Shared(NamedTuple):
    """What all layers need to know about a batch; made once."""

    chunks: Chunks | None
    rotation: Rotation | None
    blocks: Blocks | None


class Block(nn.Module):
    """One layer: n-grams where there is a table, then DeltaNet or sparse attention, then experts.

    There is no norm of its own: reading from the streams normalises.
    """

    def __init__(self, architecture: Qwen38Architecture, layer: int, kernels: Kernels) -> None:
        super().__init__()
        hidden, eps = architecture.hidden_size, architecture.norm_eps
        streams, rank = architecture.streams, architecture.mix_rank
        self.ngram: NgramInjection | None = None
        for table in architecture.tables:
            if table.layer == layer:
                kernel = architecture.ngram_conv_kernel
                self.ngram = NgramInjection(hidden, streams, eps, table, kernel)
        self.mixer_streams = StreamMixer(hidden, streams, rank, eps)
        self.attention: SparseAttention | None = None
        self.delta: DeltaNet | None = None
        if layer in architecture.sparse_layers:
            assert architecture.sparse is not None and kernels.dsa is not None
            self.attention = SparseAttention(
                hidden, architecture.sparse, eps, kernels.attention, kernels.dsa
            )
        else:
            self.delta = DeltaNet(hidden, architecture.delta, eps)
        self.mlp_streams = StreamMixer(hidden, streams, rank, eps)
        self.mlp = _make_experts(architecture, layer, kernels)

    def forward(
        self,
        x_TW: Tensor,
        shared: Shared,
        batch: PackedBatch,
        routes_Tk: Tensor | None,
        found_TGD: Tensor | None,
    ) -> Tensor:
        """The streams after this layer."""
        if self.ngram is not None:
            assert found_TGD is not None
            x_TW = x_TW + self.ngram(x_TW, found_TGD, batch.positions)
        read_TH, weights_TS = self.mixer_streams(x_TW)
        x_TW = write(x_TW, self.mix(read_TH, shared, batch), weights_TS)
        read_TH, weights_TS = self.mlp_streams(x_TW)
        return write(x_TW, self.mlp(read_TH, routes_Tk), weights_TS)

    def mix(self, x_TH: Tensor, shared: Shared, batch: PackedBatch) -> Tensor:
        """The part that moves information between tokens."""
        if self.attention is not None:
            assert shared.rotation is not None
            mixed: Tensor = self.attention(x_TH, shared.rotation, shared.blocks, batch)
            return mixed
        assert self.delta is not None
        carried: Tensor = self.delta(x_TH, batch.positions, shared.chunks)
        return carried


def _make_experts(architecture: Qwen38Architecture, layer: int, kernels: Kernels) -> MoEBlock:
    hidden, sizes = architecture.hidden_size, architecture.experts
    router = RouterSettings(
        experts=sizes.count, per_token=sizes.per_token, normalise=sizes.normalise
    )
    return MoEBlock(
        hidden,
        sizes.intermediate,
        router,
        layer,
        kernels.moe[layer],
        shared=GatedMLP(hidden, sizes.shared_intermediate),
        shared_gate=True,
    )


class Qwen38Module(nn.Module):
    """Embedding, n-gram tables, blocks, final read; the head is kept here and applied by core.

    The tables are looked up before the first block: ranks that share one exchange rows there, and
    recomputing a block does not repeat it.
    """

    def __init__(
        self,
        architecture: Qwen38Architecture,
        kernels: Kernels,
        table_trainable: bool = True,
        table_on_cpu: bool = False,
    ) -> None:
        super().__init__()
        vocabulary, hidden = architecture.vocab_size, architecture.hidden_size
        streams, rank = architecture.streams, architecture.mix_rank
        self.architecture = architecture
        self.embed_tokens = nn.Embedding(vocabulary, hidden)
        self.ngrams = nn.ModuleList(
            NgramLookup(table, table_trainable, table_on_cpu) for table in architecture.tables
        )
        sparse = architecture.sparse
        self.rotary = None if sparse is None else Rotary(sparse.rotary)
        self.layers = nn.ModuleList(
            Block(architecture, layer, kernels) for layer in range(architecture.num_layers)
        )
        self.final_streams = StreamMixer(hidden, streams, rank, architecture.norm_eps, writes=False)
        tied = architecture.tie_word_embeddings
        self.lm_head = None if tied else nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, batch: PackedBatch) -> Tensor:
        architecture = self.architecture
        found = {
            table.layer: lookup(batch)
            for table, lookup in zip(architecture.tables, self.ngrams, strict=True)
        }
        x_TH = self.embed_tokens(batch.input_ids)
        shared = self._shared(batch, x_TH)
        routes = routes_by_layer(batch, len(self.layers), architecture.experts.per_token)
        x_TW = x_TH.repeat(1, architecture.streams)
        for number, block in enumerate(self.layers):
            x_TW = block(x_TW, shared, batch, routes[number], found.get(number))
        final_TH: Tensor = self.final_streams(x_TW)[0]
        return final_TH

    def _shared(self, batch: PackedBatch, x_TH: Tensor) -> Shared:
        sparse = self.architecture.sparse
        blocks = None
        if sparse is not None and needs_blocks(sparse, batch):
            blocks = cut_blocks(batch, sparse.block)
        return Shared(
            chunks=cut_chunks(batch.lengths, x_TH.device)
            if self.architecture.delta_layers
            else None,
            rotation=None if self.rotary is None else self.rotary(batch.positions, x_TH.dtype),
            blocks=blocks,
        )
