"""Token-by-token generation with cached keys and values.

R requests, T new tokens, S cache slots that are read, L cached positions that are read, N query
heads, K key heads, G = N / K query heads per key head, D head size, B = S * K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from prime_rl.api.model import Decoder, DecodeRequest
from prime_rl_model_qwen3.architecture import Qwen3Architecture
from prime_rl_model_qwen3.model import Attention, Block, Qwen3Module


class Qwen3Decoder(Decoder):
    """Keeps every sequence's keys and values in a slot of one static cache.

    A step in which every request appends one token is a fixed handful of batched operations per
    layer; other steps compute whole new sequences together and the rest one by one.
    """

    def __init__(
        self, module: Qwen3Module, architecture: Qwen3Architecture, max_slots: int, max_length: int
    ) -> None:
        weight = module.embed_tokens.weight
        self.module = module
        self.device, self.dtype = weight.device, weight.dtype
        self.blocks = [block for block in module.layers if isinstance(block, Block)]
        self.heads = architecture.num_heads
        self.key_heads = architecture.num_key_value_heads
        self.head_dim = architecture.head_dim
        self.max_slots, self.max_length = max_slots, max_length
        shape = (2, max_slots, self.key_heads, max_length, self.head_dim)
        self.caches = [
            torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in self.blocks
        ]
        rotation = module.rotary(torch.arange(max_length, device=self.device), self.dtype)
        first_sin, second_sin = rotation.sin_TD.chunk(2, dim=-1)
        # Swapping the halves of a head replaces negating one of them: the sign is in the sine.
        signed_sin = torch.cat((-first_sin, second_sin), dim=-1)
        self.rotation_L2D = torch.stack((rotation.cos_TD, signed_sin), dim=1)
        self.places_L = torch.arange(max_length, device=self.device)
        self.norm_weights: list[Tensor] = []

    def forget(self) -> None:
        """The next forward reads the weights anew; cached positions are void."""
        self.norm_weights = []

    @torch.inference_mode()
    def forward(self, requests: Sequence[DecodeRequest]) -> Tensor:
        """[R, H], final hidden state of the last token of each request.

        Raises ValueError when a request does not fit its slot.
        """
        step = self._prepare(requests)
        if not self.norm_weights:
            self.norm_weights = [self._norm_weights(block.attention) for block in self.blocks]
        x_TH = F.embedding(step.tokens_T, self.module.embed_tokens.weight)
        for block, cache, weights in zip(self.blocks, self.caches, self.norm_weights, strict=True):
            attention = block.attention
            fused = self._project(attention, block.input_norm(x_TH), weights, step)
            cache[:, step.slots_T, :, step.positions_T] = fused[:, self.heads :].unflatten(
                1, (2, self.key_heads)
            )
            mixed_TF = self._attend(attention, fused, cache, step)
            x_TH = _project_onto(x_TH, mixed_TF, attention.out.weight, attention.out.bias)
            x_TH = x_TH + block.feed_forward(block.mlp_norm(x_TH))
        if step.last_R is not None:
            x_TH = x_TH[step.last_R]
        final: Tensor = self.module.norm(x_TH)
        return final

    def _prepare(self, requests: Sequence[DecodeRequest]) -> _Step:
        tokens: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        for request in requests:
            count = len(request.tokens)
            if not 0 <= request.slot < self.max_slots:
                raise ValueError(f"slot {request.slot}: the cache has {self.max_slots} slots")
            if count == 0 or request.start < 0 or request.start + count > self.max_length:
                raise ValueError(
                    f"slot {request.slot}: {count} tokens from position {request.start} on; "
                    f"expected at least 1 within {self.max_length} positions"
                )
            tokens += request.tokens
            slots += [request.slot] * count
            positions += range(request.start, request.start + count)
            last.append(len(tokens) - 1)
        if len({request.slot for request in requests}) != len(requests):
            raise ValueError("two requests use one slot")
        positions_T = torch.tensor(positions, device=self.device)
        cos_T1D, sin_T1D = self.rotation_L2D[positions_T][:, :, None].unbind(1)
        is_single = len(tokens) == len(requests)
        return _Step(
            tokens_T=torch.tensor(tokens, device=self.device),
            slots_T=torch.tensor(slots, device=self.device),
            positions_T=positions_T,
            cos_T1D=cos_T1D,
            sin_T1D=sin_T1D,
            last_R=None if is_single else torch.tensor(last, device=self.device),
            singles=self._singles(requests, is_single),
            fresh=_fresh(requests, self.device),
            extensions=_extensions(requests),
        )

    def _singles(self, requests: Sequence[DecodeRequest], is_all: bool) -> _Singles | None:
        """How to read the cache for the requests of one token."""
        chosen = [request for request in requests if len(request.tokens) == 1]
        if not chosen:
            return None
        rows = None if is_all else torch.tensor(_first_rows(requests, 1), device=self.device)
        slots = [request.slot for request in chosen]
        longest = 1 + max(request.start for request in chosen)
        used = max(slots) + 1
        in_order = slots == list(range(used))
        # Reading idle slots too is cheaper than copying the busy ones, up to a point.
        gathered = None if used <= 2 * len(slots) else torch.tensor(slots, device=self.device)
        places_R = None
        if gathered is None and not in_order:
            places_R = torch.tensor(slots, device=self.device)
        starts = [0] * used if places_R is not None else [request.start for request in chosen]
        if places_R is not None:
            for request in chosen:
                starts[request.slot] = request.start
        mask_BGL = None
        if min(starts) + 1 < longest:
            starts_S = torch.tensor(starts, device=self.device)
            hidden_SL = self.places_L[:longest] > starts_S[:, None]
            mask_SL = torch.zeros(hidden_SL.shape, dtype=self.dtype, device=self.device)
            mask_SL.masked_fill_(hidden_SL, -torch.inf)
            repeated = (-1, self.key_heads, self.heads // self.key_heads, -1)
            mask_BGL = mask_SL[:, None, None].expand(repeated).flatten(0, 1)
        return _Singles(rows, len(starts), longest, gathered, places_R, mask_BGL)

    def _norm_weights(self, attention: Attention) -> Tensor:
        """[N + K, D]: the weights of query and key norms, head by head."""
        query_ND = attention.q_norm.weight.expand(self.heads, -1)
        return torch.cat((query_ND, attention.k_norm.weight.expand(self.key_heads, -1)))

    def _project(
        self, attention: Attention, x_TH: Tensor, weights_MD: Tensor, step: _Step
    ) -> Tensor:
        """[T, N + 2K, D]: queries, keys, values; queries and keys normalised and rotated."""
        fused = F.linear(x_TH, attention.qkv.weight, attention.qkv.bias)
        fused = fused.unflatten(1, (-1, self.head_dim))
        both_TMD = fused[:, : self.heads + self.key_heads]
        normal = F.rms_norm(both_TMD.float(), (self.head_dim,), None, attention.q_norm.eps)
        normal = normal.to(self.dtype) * weights_MD
        swapped = normal.roll(self.head_dim // 2, -1)
        torch.addcmul(normal * step.cos_T1D, swapped, step.sin_T1D, out=both_TMD)
        return fused

    def _attend(self, attention: Attention, fused: Tensor, cache: Tensor, step: _Step) -> Tensor:
        """[T, N * D]."""
        singles = step.singles
        if singles is not None and singles.rows is None:
            return self._attend_singles(fused[:, : self.heads], cache, singles)
        mixed_TND = torch.empty_like(fused[:, : self.heads])
        if singles is not None:
            queries = fused[singles.rows, : self.heads]
            mixed_TND[singles.rows] = self._attend_singles(queries, cache, singles).view_as(queries)
        if step.fresh is not None:
            self._attend_fresh(attention, fused, step.fresh, mixed_TND)
        for slot, first, count, start in step.extensions:
            queries = fused[first : first + count, : self.heads]
            mixed = self._attend_extension(queries, cache[:, slot, :, : start + count], start)
            mixed_TND[first : first + count] = mixed
        return mixed_TND.flatten(1)

    def _attend_singles(self, q_RND: Tensor, cache: Tensor, singles: _Singles) -> Tensor:
        """[R, N * D] of one query per request against its slot."""
        requests = q_RND.shape[0]
        if singles.gathered is not None:
            read = cache[:, singles.gathered, :, : singles.longest]
        else:
            read = cache[:, : singles.slots, :, : singles.longest]
        keys_BLD, values_BLD = read.flatten(1, 2).unbind(0)
        if singles.places_R is not None:
            scattered = q_RND.new_zeros((singles.slots, *q_RND.shape[1:]))
            scattered[singles.places_R] = q_RND
            q_RND = scattered
        q_BGD = q_RND.reshape(keys_BLD.shape[0], -1, self.head_dim)
        scale = self.head_dim**-0.5
        keys_BDL = keys_BLD.transpose(1, 2)
        if singles.mask_BGL is None:
            scores_BGL = torch.bmm(q_BGD, keys_BDL).mul_(scale)
        else:
            scores_BGL = torch.baddbmm(singles.mask_BGL, q_BGD, keys_BDL, alpha=scale)
        mixed_BGD = torch.bmm(scores_BGL.softmax(-1), values_BLD)
        mixed_SF = mixed_BGD.view(singles.slots, -1)
        return (
            mixed_SF if singles.places_R is None else mixed_SF[singles.places_R].view(requests, -1)
        )

    def _attend_fresh(
        self, attention: Attention, fused: Tensor, fresh: _Fresh, mixed_TND: Tensor
    ) -> None:
        """New sequences: the packed attention the trainer uses."""
        heads = (self.heads, self.key_heads, self.key_heads)
        q_TND, k_TKD, v_TKD = fused[fresh.rows].split(heads, dim=1)
        mixed_TND[fresh.rows] = attention.backend.attend(
            q_TND, k_TKD, v_TKD, fresh.cu_seqlens, fresh.lengths, self.head_dim**-0.5
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
            scale=self.head_dim**-0.5,
            enable_gqa=self.heads != self.key_heads,
        )
        return mixed[0].transpose(0, 1)


@dataclass(frozen=True)
class _Singles:
    """Requests that append one token."""

    rows: Tensor | None
    """Their rows among the T new tokens; None: all of them."""
    slots: int
    """S"""
    longest: int
    """L"""
    gathered: Tensor | None
    """Slots to copy out of the cache, [R]; None: the first S slots are read where they are."""
    places_R: Tensor | None
    """Slot of each request, when the first S slots are read and requests are not in their order."""
    mask_BGL: Tensor | None
    """0 or -inf to add to the scores; None when every place is visible."""


@dataclass(frozen=True)
class _Fresh:
    """Requests that start a sequence with several tokens."""

    rows: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]


@dataclass(frozen=True)
class _Step:
    """What all layers of one forward share."""

    tokens_T: Tensor
    slots_T: Tensor
    positions_T: Tensor
    cos_T1D: Tensor
    sin_T1D: Tensor
    last_R: Tensor | None
    """Rows of the last tokens; None: every row is one."""
    singles: _Singles | None
    fresh: _Fresh | None
    extensions: tuple[tuple[int, int, int, int], ...]
    """(slot, first row, tokens, first position) of longer appendages to cached sequences."""


def _fresh(requests: Sequence[DecodeRequest], device: torch.device) -> _Fresh | None:
    rows: list[int] = []
    lengths: list[int] = []
    first = 0
    for request in requests:
        count = len(request.tokens)
        if count > 1 and request.start == 0:
            rows += range(first, first + count)
            lengths.append(count)
        first += count
    if not rows:
        return None
    borders = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return _Fresh(torch.tensor(rows, device=device), borders.to(device), tuple(lengths))


def _extensions(requests: Sequence[DecodeRequest]) -> tuple[tuple[int, int, int, int], ...]:
    found: list[tuple[int, int, int, int]] = []
    first = 0
    for request in requests:
        count = len(request.tokens)
        if count > 1 and request.start > 0:
            found.append((request.slot, first, count, request.start))
        first += count
    return tuple(found)


def _first_rows(requests: Sequence[DecodeRequest], count: int) -> list[int]:
    """Row of the first token of every request that has `count` tokens."""
    rows: list[int] = []
    first = 0
    for request in requests:
        if len(request.tokens) == count:
            rows.append(first)
        first += len(request.tokens)
    return rows


def _project_onto(x_TH: Tensor, mixed_TF: Tensor, weight_HF: Tensor, bias: Tensor | None) -> Tensor:
    """x + mixed W^T (+ bias)."""
    out = torch.addmm(x_TH, mixed_TF, weight_HF.t())
    return out if bias is None else out.add_(bias)
