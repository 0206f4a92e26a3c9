"""The generic path: a decoder without memory. It serves every model plugin, the day it trains."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from prime_rl.api.batch import PackedBatch
from prime_rl.api.model import Decoder, DecodeRequest, Model


class RecomputeDecoder(Decoder):
    """Keeps token ids instead of keys and values; each call is a packed forward over whole
    sequences. With routed experts recorded, rows come in request order, whole sequences each."""

    def __init__(
        self, plugin: Model, module: nn.Module, device: torch.device, max_batch_tokens: int
    ) -> None:
        self.plugin = plugin
        self.module = module
        self.device = device
        self.max_batch_tokens = max_batch_tokens
        self._tokens: dict[int, list[int]] = {}

    def forward(self, requests: Sequence[DecodeRequest]) -> Tensor:
        """As `Decoder.forward`. Packs of at most `max_batch_tokens` tokens where sequences allow."""
        documents = []
        for request in requests:
            known = self._tokens.setdefault(request.slot, [])
            del known[request.start :]
            if len(known) < request.start:
                raise ValueError(
                    f"slot {request.slot} holds {len(known)} tokens, the request starts at "
                    f"{request.start}"
                )
            known.extend(request.tokens)
            documents.append(known)
        hidden = [self._last_hidden(pack) for pack in self._packs(documents)]
        return hidden[0] if len(hidden) == 1 else torch.cat(hidden)

    def forget(self) -> None:
        """Drop the token ids; the engine appends running sequences anew."""
        self._tokens.clear()

    def _packs(self, documents: list[list[int]]) -> list[list[list[int]]]:
        packs: list[list[list[int]]] = []
        room = 0
        for document in documents:
            if not packs or len(document) > room:
                packs.append([])
                room = self.max_batch_tokens
            packs[-1].append(document)
            room -= len(document)
        return packs

    def _last_hidden(self, documents: list[list[int]]) -> Tensor:
        batch = PackedBatch.from_documents(documents, device=str(self.device))
        hidden = self.plugin.forward(self.module, batch)
        return hidden[batch.cu_seqlens[1:].long() - 1]
