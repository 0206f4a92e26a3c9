"""Token-by-token generation with cached keys and values.

R requests, T new tokens, S cache slots that are read, L cached positions that are read, N query
heads, K key heads, G = N / K query heads per key head, D head size, B = S * K.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl.api.model import Decoder, DecodeRequest
from prime_rl_model_qwen3.architecture import Qwen3Architecture
from prime_rl_model_qwen3.decode_layer import LayerMath
from prime_rl_model_qwen3.decode_plan import (
    Fresh,
    Singles,
    Step,
    extensions,
    fresh_sequences,
    plain_numbers,
)
from prime_rl_model_qwen3.decode_step import PlainStep, StepLayer, StepModel
from prime_rl_model_qwen3.model import Block, Qwen3Module

COPIED_BYTES = 256 * 1024**2
"""Models up to this size keep a transposed copy of their weights for decoding on a CPU."""


READ_BLOCK = 32
"""Plain steps read whole blocks of positions, so that their buffers serve for as many steps."""


class Qwen3Decoder(Decoder):
    """Keeps every sequence's keys and values in a slot of one static cache.

    Steps of one token for each of the first slots run in fixed buffers where the model is small,
    in float32 and on a CPU. In all others single tokens are a handful of batched operations per
    layer, whole new sequences are computed together and the rest one by one.
    """

    def __init__(
        self, module: Qwen3Module, architecture: Qwen3Architecture, max_slots: int, max_length: int
    ) -> None:
        weight = module.embed_tokens.weight
        self.module = module
        self.device, self.dtype = weight.device, weight.dtype
        self.heads = architecture.num_heads
        self.key_heads = architecture.num_key_value_heads
        self.head_dim = architecture.head_dim
        self.max_slots, self.max_length = max_slots, max_length
        weight_bytes = sum(p.numel() * p.element_size() for p in module.layers.parameters())
        is_cpu = weight.device.type == "cpu"
        layers = len(module.layers)
        shape = (layers, 2, max_slots, self.key_heads, max_length, self.head_dim)
        self.cache = torch.zeros(shape, dtype=self.dtype, device=self.device)
        # Keys and values of each layer in turn, slots and heads in one dimension, as they are read.
        self.flat_cache = self.cache.view(2 * layers, -1, max_length, self.head_dim)
        # By slot and position, as new keys and values are written: [S, L, 2, K, D] per layer.
        self.places = self.cache.permute(0, 2, 4, 1, 3, 5).unbind(0)
        rotation = module.rotary(torch.arange(max_length, device=self.device), self.dtype)
        self.rotation_L21D = torch.stack(rotation, dim=1).unsqueeze(2)
        self.places_L = torch.arange(max_length, device=self.device)
        self.no_mask = torch.zeros((1, 1, 1), dtype=self.dtype, device=self.device)
        copies = is_cpu and weight_bytes <= COPIED_BYTES
        self.math = LayerMath(architecture, self.device, self.dtype, copies)
        self.step: PlainStep | None = None
        self.step_model: StepModel | None = None
        self.layers: list[StepLayer] = []
        self.final_norm: Tensor = weight

    def forget(self) -> None:
        """The next forward reads the weights anew; cached positions are void."""
        self.layers = []

    def forward(self, requests: Sequence[DecodeRequest]) -> Tensor:
        """[R, H], final hidden state of the last token of each request.

        Raises ValueError when a request does not fit its slot.
        """
        if torch.is_inference_mode_enabled():  # entering it again costs 20 us
            return self._forward(requests)
        with torch.inference_mode():
            return self._forward(requests)

    def _forward(self, requests: Sequence[DecodeRequest]) -> Tensor:
        if not self.layers:
            self._read_weights()
        if self.step_model is not None and (numbers := plain_numbers(requests)) is not None:
            return self._run_plain(self.step_model, *numbers)
        step = self._prepare(requests)
        x_TH = F.embedding(step.tokens_T, self.module.embed_tokens.weight)
        for number in range(len(self.layers)):
            x_TH = self._run_layer(number, x_TH, step)
        if step.last_R is not None:
            x_TH = x_TH[step.last_R]
        return self.math.norm(x_TH, self.final_norm)

    def _read_weights(self) -> None:
        self.layers = [
            StepLayer(
                block, self.math.attention_weights(block), self.math.mlp_weights(block), cache
            )
            for block, cache in zip(self.module.layers, self.cache, strict=True)
            if isinstance(block, Block)
        ]
        self.final_norm = self.math.norm.prepare(self.module.norm.weight)
        self.step = self.step_model = None
        if self.math.folds:
            embedding = self.module.embed_tokens.weight
            self.step_model = StepModel(
                self.math, self.layers, embedding, self.final_norm, self.rotation_L21D
            )

    def _run_plain(self, model: StepModel, tokens: list[int], starts: list[int]) -> Tensor:
        """One new token in each of the first slots."""
        used, last = len(starts), max(starts)
        if used > self.max_slots or min(starts) < 0 or last >= self.max_length:
            raise ValueError(
                f"{used} requests at positions {starts}: the cache has {self.max_slots} slots of "
                f"{self.max_length} positions"
            )
        length = min((last // READ_BLOCK + 1) * READ_BLOCK, self.max_length)
        if self.step is None or self.step.rows != used or self.step.length != length:
            self.step = PlainStep(model, used, length)
        return self.step(tokens, starts)

    def _run_layer(self, number: int, x_TH: Tensor, step: Step) -> Tensor:
        """One layer for any mixture of requests."""
        layer, math = self.layers[number], self.math
        attention = layer.block.attention
        rotation = (step.cos_T1D, step.sin_T1D)
        fused = math.project(x_TH, *rotation, layer.attention, attention.qkv.bias)
        math.store(fused, self.places[number], step.slots_T, step.positions_T)
        mixed_TF = self._attend(number, fused, step)
        x_TH, normal_TH = math.add_attention(x_TH, mixed_TF, layer.attention, attention.out.bias)
        if layer.mlp is not None:
            return math.add_mlp(x_TH, normal_TH, layer.mlp)
        return x_TH + layer.block.feed_forward(normal_TH)

    def _prepare(self, requests: Sequence[DecodeRequest]) -> Step:
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for request in requests:
            count = len(request.tokens)
            self._check(request, count)
            tokens += request.tokens
            slots += [request.slot] * count
            positions += range(request.start, request.start + count)
            last.append(len(tokens) - 1)
        if len({request.slot for request in requests}) != len(requests):
            raise ValueError("two requests use one slot")
        tokens_T, slots_T, positions_T = torch.tensor(
            [tokens, slots, positions], device=self.device
        ).unbind(0)
        cos_T1D, sin_T1D = self.rotation_L21D[positions_T].unbind(1)
        is_single = len(tokens) == len(requests)
        return Step(
            tokens_T=tokens_T,
            slots_T=slots_T,
            positions_T=positions_T,
            cos_T1D=cos_T1D,
            sin_T1D=sin_T1D,
            last_R=None if is_single else torch.tensor(last, device=self.device),
            singles=self._singles(requests, None if is_single else last),
            fresh=None if is_single else fresh_sequences(requests, self.device),
            extensions=() if is_single else extensions(requests),
        )

    def _check(self, request: DecodeRequest, count: int) -> None:
        if not 0 <= request.slot < self.max_slots:
            raise ValueError(f"slot {request.slot}: the cache has {self.max_slots} slots")
        if count == 0 or request.start < 0 or request.start + count > self.max_length:
            raise ValueError(
                f"slot {request.slot}: {count} tokens from position {request.start} on; "
                f"expected at least 1 within {self.max_length} positions"
            )

    def _singles(self, requests: Sequence[DecodeRequest], last: list[int] | None) -> Singles | None:
        """How to read the cache for the requests of one token; `last` is None when all are such."""
        chosen = [request for request in requests if len(request.tokens) == 1]
        if not chosen:
            return None
        rows = None
        if last is not None:
            own = [row for row, r in zip(last, requests, strict=True) if len(r.tokens) == 1]
            rows = torch.tensor(own, device=self.device)
        slots = [request.slot for request in chosen]
        starts = [request.start for request in chosen]
        longest = 1 + max(starts)
        used = max(slots) + 1
        places_R = None
        read: tuple[Tensor, ...] | None = None
        if used > 2 * len(slots):
            places_R = torch.tensor(slots, device=self.device)
        else:  # reading idle slots too is cheaper than copying the busy ones
            if slots != list(range(used)):
                places_R = torch.tensor(slots, device=self.device)
                by_slot = dict(zip(slots, starts, strict=True))
                starts = [by_slot.get(slot, 0) for slot in range(used)]
            # [2 * layers] of [B, L, D]: keys and values of each layer in turn, as views.
            read = self.flat_cache[:, : used * self.key_heads, :longest].unbind(0)
        return Singles(rows, longest, len(starts), places_R, read, self._mask(starts, longest))

    def _mask(self, starts: list[int], longest: int) -> Tensor:
        """[B, G, L] to add to the scores, 0 or -inf; one 0 when everybody sees every place."""
        if min(starts) + 1 == longest:
            return self.no_mask
        starts_S1 = torch.tensor(starts, device=self.device).unsqueeze(1)
        mask_SL = torch.zeros((len(starts), longest), dtype=self.dtype, device=self.device)
        mask_SL.masked_fill_(self.places_L[:longest] > starts_S1, -torch.inf)
        repeated = (-1, self.key_heads, self.heads // self.key_heads, -1)
        return mask_SL[:, None, None].expand(repeated).flatten(0, 1)

    def _attend(self, number: int, fused: Tensor, step: Step) -> Tensor:
        """[T, N * D] of layer `number`."""
        singles = step.singles
        if singles is not None and singles.rows is None:
            return self._attend_singles(number, fused[:, : self.heads], singles)
        mixed_TND = torch.empty_like(fused[:, : self.heads])
        if singles is not None:
            queries = fused[singles.rows, : self.heads]
            mixed = self._attend_singles(number, queries, singles)
            mixed_TND[singles.rows] = mixed.view_as(queries)
        if step.fresh is not None:
            self._attend_fresh(number, fused, step.fresh, mixed_TND)
        for slot, first, count, start in step.extensions:
            queries = fused[first : first + count, : self.heads]
            read = self.cache[number, :, slot, :, : start + count]
            mixed_TND[first : first + count] = self._attend_extension(queries, read, start)
        return mixed_TND.flatten(1)

    def _attend_singles(self, number: int, q_RND: Tensor, singles: Singles) -> Tensor:
        """[R, N * D] of one query per request against its slot."""
        mask_BGL = singles.mask_BGL
        if singles.read is None:
            busy = self.cache[number][:, singles.places_R, :, : singles.longest]
            return self.math.attend(q_RND, mask_BGL, *busy.flatten(1, 2).unbind(0))
        kv_BLD = singles.read[2 * number : 2 * number + 2]
        if singles.places_R is None:
            return self.math.attend(q_RND, mask_BGL, *kv_BLD)
        q_SND = q_RND.new_zeros((singles.slots, *q_RND.shape[1:]))
        q_SND[singles.places_R] = q_RND
        return self.math.attend(q_SND, mask_BGL, *kv_BLD)[singles.places_R]

    def _attend_fresh(self, number: int, fused: Tensor, fresh: Fresh, mixed_TND: Tensor) -> None:
        """New sequences: the packed attention the trainer uses."""
        heads = (self.heads, self.key_heads, self.key_heads)
        q_TND, k_TKD, v_TKD = fused[fresh.rows].split(heads, dim=1)
        mixed_TND[fresh.rows] = self.layers[number].block.attention.backend.attend(
            q_TND, k_TKD, v_TKD, fresh.cu_seqlens, fresh.lengths, self.math.scale
        )

    def _attend_extension(self, q_TND: Tensor, read: Tensor, start: int) -> Tensor:
        """Several tokens appended to a cached sequence; read is [2, K, L, D]."""
        count = q_TND.shape[0]
        keys_KLD, values_KLD = (half.unsqueeze(0) for half in read.unbind(0))
        is_visible = self.places_L[: start + count] <= self.places_L[start : start + count, None]
        mixed = F.scaled_dot_product_attention(
            q_TND.transpose(0, 1).unsqueeze(0),
            keys_KLD,
            values_KLD,
            attn_mask=is_visible,
            scale=self.math.scale,
            enable_gqa=self.heads != self.key_heads,
        )
        return mixed[0].transpose(0, 1)
