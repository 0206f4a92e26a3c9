"""Runs the model for the scheduler: appends tokens, gives float32 logits, takes new weights."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from prime_rl.api.model import Decoder, DecodeRequest, Model
from prime_rl.api.transport import NamedTensor
from prime_rl.errors import ConfigError
from prime_rl.inference.recompute import RecomputeDecoder
from prime_rl.inference.sequence import Sequence
from prime_rl.layers import routing
from prime_rl.models.head import head_weight
from prime_rl.models.load import load_named

COPIED_HEAD_BYTES = 64 * 2**20
"""Heads up to this size are kept a second time, transposed."""

LARGEST_ROW_HEAD = 2**17
"""Elements of heads that numpy multiplies a single row by: it takes half of torch's time, and its
BLAS no threads."""


class ModelRunner:
    """One module, one decoder. Used from the engine thread only."""

    def __init__(
        self,
        plugin: Model,
        architecture: Any,
        module: nn.Module,
        layout: Any,
        *,
        max_running: int,
        max_model_len: int,
        max_batch_tokens: int,
        use_decode_cache: bool | str = "auto",
        records_routes: bool = False,
    ) -> None:
        self.plugin = plugin
        self.module = module
        self.layout = layout
        self.num_layers: int = architecture.num_layers
        self.vocab_size: int = architecture.vocab_size
        self.device = next(module.parameters()).device
        self.records_routes = records_routes
        self._make_decoder = lambda: _decoder(
            plugin,
            architecture,
            module,
            max_running,
            max_model_len,
            max_batch_tokens,
            use_decode_cache,
            self.device,
        )
        self.decoder = self._make_decoder()
        self.is_cached = not isinstance(self.decoder, RecomputeDecoder)
        self._read_head()

    def append(self, sequences: list[Sequence], requests: list[DecodeRequest]) -> Tensor:
        """Append each request to its sequence; final hidden states [B, H] of the last tokens.

        Marks the tokens as cached and, when experts are recorded, adds those of new tokens.
        """
        with routing.recording() if self.records_routes else nullcontext() as record:
            hidden = self.decoder.forward(requests)
        if record is not None:
            self._store_routes(record, sequences, requests)
        for sequence, request in zip(sequences, requests, strict=True):
            sequence.cached = request.start + len(request.tokens)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [B, V] of hidden states [B, H]; products of bfloat16 values are summed in
        float32, as the trainer does."""
        if self.device.type == "cuda" and self._head_HV.dtype != torch.float32:
            return torch.mm(hidden.to(self._head_HV.dtype), self._head_HV, out_dtype=torch.float32)
        if self._row_head_HV is not None and hidden.shape[0] == 1:
            return torch.from_numpy(numpy.dot(hidden.float().numpy(), self._row_head_HV))
        return torch.mm(hidden.float(), self._head_HV)

    def update(self, tensors: Iterable[NamedTensor]) -> None:
        """Write new weights in place and forget what was cached with the old ones."""
        try:
            load_named(self.module, self.layout, tensors)
        finally:
            self._read_head()
            self.decoder.forget()

    def renew_decoder(self) -> None:
        """Replace the cache: values that are no numbers stay in it past `forget`, and reach other
        sequences through masked places (0 times NaN is NaN)."""
        del self.decoder
        self.decoder = self._make_decoder()

    def _read_head(self) -> None:
        """The head's weight as [H, V]; on a CPU in float32, and transposed in memory when small:
        few rows are multiplied by it up to three times faster."""
        head_HV = head_weight(self.module).detach().T
        if self.device.type == "cpu":
            head_HV = head_HV.float()
            if head_HV.nbytes <= COPIED_HEAD_BYTES:
                head_HV = head_HV.contiguous()
        self._head_HV = head_HV
        is_tiny = self.device.type == "cpu" and head_HV.numel() <= LARGEST_ROW_HEAD
        self._row_head_HV = head_HV.numpy() if is_tiny else None

    def _store_routes(
        self,
        record: routing.RoutingRecord,
        sequences: list[Sequence],
        requests: list[DecodeRequest],
    ) -> None:
        stacked = record.stacked(self.num_layers)
        if stacked is None:
            return
        rows = stacked.to("cpu").numpy()
        offset = 0
        for sequence, request in zip(sequences, requests, strict=True):
            end = request.start + len(request.tokens)
            first = request.start if self.is_cached else 0
            if sequence.wants_routes and end > sequence.routed_tokens:
                piece = rows[offset + sequence.routed_tokens - first : offset + end - first]
                sequence.routes.append(numpy.array(piece, copy=True))
                sequence.routed_tokens = end
            offset += end - first
        if offset != rows.shape[0]:
            raise ValueError(f"experts of {rows.shape[0]} tokens recorded, expected {offset}")


def _decoder(
    plugin: Model,
    architecture: Any,
    module: nn.Module,
    max_running: int,
    max_model_len: int,
    max_batch_tokens: int,
    use_decode_cache: bool | str,
    device: torch.device,
) -> Decoder:
    """The plugin's decode cache, or the generic path."""
    decoder = None
    if use_decode_cache:
        try:
            decoder = plugin.decoder(module, architecture, max_running, max_model_len)
        except torch.OutOfMemoryError as error:
            raise ConfigError(
                f"the decode cache of {max_running} sequences of {max_model_len} tokens does not "
                "fit into the device's memory; lower inference.engine.max_running or "
                f"inference.max_model_len ({str(error).splitlines()[0]})"
            ) from error
    if decoder is None and use_decode_cache is True:
        raise ConfigError(
            f"inference.engine.use_decode_cache is true, but the model plugin "
            f'{type(plugin).__name__} offers no decode cache; set it to "auto" or false'
        )
    return decoder or RecomputeDecoder(plugin, module, device, max_batch_tokens)
