"""The module and the decode cache of the toy model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from prime_rl.api.batch import PackedBatch
from prime_rl.api.model import Decoder, DecodeRequest
from prime_rl.layers import routing

if TYPE_CHECKING:
    from prime_rl.testing.toy_model import ToyArchitecture


class ToyLayer(nn.Module):
    """x + gain of the chosen expert * tanh(mix(mean of x so far))."""

    def __init__(self, architecture: ToyArchitecture, number: int) -> None:
        super().__init__()
        width = architecture.hidden_size
        self.number = number
        self.mix = nn.Linear(width, width, bias=False)
        self.router = nn.Linear(width, architecture.num_experts, bias=False)
        self.gains = nn.Parameter(torch.empty(architecture.num_experts))

    def forward(self, x_TH: Tensor, means_TH: Tensor) -> Tensor:
        """[T, H]; means_TH is the mean of x over the document's tokens up to each."""
        change_TH = torch.tanh(self.mix(means_TH))
        if self.number % 2:
            chosen_T1 = self.router(x_TH).argmax(dim=-1, keepdim=True)
            routing.record(self.number, chosen_T1)
            change_TH = change_TH * self.gains[chosen_T1]
        return x_TH + change_TH


class ToyModule(nn.Module):
    """Packed documents to hidden states."""

    def __init__(self, architecture: ToyArchitecture) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(architecture.vocab_size, architecture.hidden_size)
        self.layers = nn.ModuleList(
            ToyLayer(architecture, number) for number in range(architecture.num_layers)
        )
        self.lm_head = (
            None
            if architecture.tie_word_embeddings
            else nn.Linear(architecture.hidden_size, architecture.vocab_size, bias=False)
        )

    def forward(self, batch: PackedBatch) -> Tensor:
        """Final hidden states [T, H]."""
        x_TH = self.embed_tokens(batch.input_ids)
        counts_T1 = (batch.positions + 1)[:, None]
        for layer in self.layers:
            sums = [part.cumsum(dim=0) for part in x_TH.split(batch.lengths)]
            x_TH = layer(x_TH, torch.cat(sums) / counts_T1)
        return x_TH


class ToyDecoder(Decoder):
    """Keeps the running sum of each layer's inputs per slot."""

    def __init__(self, module: nn.Module, max_slots: int) -> None:
        assert isinstance(module, ToyModule)
        self.module = module
        self.max_slots = max_slots
        self._sums: dict[int, list[Tensor]] = {}
        self._lengths: dict[int, int] = {}

    def forward(self, requests: Sequence[DecodeRequest]) -> Tensor:
        """As `Decoder.forward`."""
        return torch.stack([self._one(request) for request in requests])

    def forget(self) -> None:
        """As `Decoder.forget`."""
        self._sums.clear()
        self._lengths.clear()

    def _one(self, request: DecodeRequest) -> Tensor:
        module = self.module
        if request.start == 0:
            self._lengths[request.slot] = 0
            self._sums[request.slot] = [torch.zeros(1)] * len(module.layers)
        if self._lengths.get(request.slot) != request.start:
            raise ValueError(f"slot {request.slot} does not hold {request.start} tokens")
        x_TH = module.embed_tokens(torch.tensor(list(request.tokens)))
        counts_T1 = torch.arange(len(request.tokens))[:, None] + request.start + 1
        sums = []
        for layer, before in zip(module.layers, self._sums[request.slot], strict=True):
            running = x_TH.cumsum(dim=0) + before
            sums.append(running[-1])
            x_TH = layer(x_TH, running / counts_T1)
        self._sums[request.slot] = sums
        self._lengths[request.slot] = request.start + len(request.tokens)
        return x_TH[-1]
