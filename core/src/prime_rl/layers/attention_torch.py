"""Core's attention back end `torch`: scaled-dot-product attention over groups of like documents.

T tokens, B documents of a group, L padded length of the group, H query heads, K key heads.
"""

from __future__ import annotations

import inspect
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple

from prime_rl.api.backends import AttentionBackend
from prime_rl.api.plugin import Capabilities
from prime_rl.configs.base import PluginConfig

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PADDING_LIMIT = 1.25
"""Documents share a group while the longest is at most this factor longer than the shortest."""
PADDING_TOKENS = 8
"""... or at most this many tokens longer."""


class TorchAttentionConfig(PluginConfig):
    """Nothing to set."""

    type: Literal["torch"] = "torch"


class TorchAttention(AttentionBackend):
    """Causal attention inside documents on any device torch has.

    Documents of similar length are padded into one batch, so a row of 500 short documents is a few
    calls; padding stands after a document's tokens, where causality hides it. No T x T mask. Where
    torch has a kernel for documents of different lengths (half precision on CUDA), that is used.
    """

    Config = TorchAttentionConfig
    capabilities: ClassVar[Capabilities] = {
        "devices": ("cpu", "cuda"),
        "dtypes": ("float32", "bfloat16", "float16"),
    }

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKE: Tensor,
        cu_seqlens: Tensor,
        lengths: tuple[int, ...],
        scale: float,
    ) -> Tensor:
        import torch

        plan = plan_groups(tuple(lengths), q_THD.device)
        if plan.inverse is not None and _fits_varlen(q_THD, v_TKE):
            return _attend_varlen(q_THD, k_TKD, v_TKE, cu_seqlens, max(lengths), scale)
        outputs = [
            _attend_group(q_THD, k_TKD, v_TKE, group, scale).flatten(0, 1) for group in plan.groups
        ]
        if plan.inverse is None:
            return outputs[0]
        return torch.cat(outputs)[plan.inverse]


@lru_cache(maxsize=1)
def _varlen_options() -> dict[str, Any] | None:
    """How to ask torch's kernel for causal attention with fewer key heads; None without one."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in known else {}
    return {**options, "window_size": (-1, 0)} if "window_size" in known else None


def _fits_varlen(q_THD: Tensor, v_TKE: Tensor) -> bool:
    size = q_THD.shape[-1]
    is_half = q_THD.is_cuda and q_THD.element_size() == 2
    return is_half and size == v_TKE.shape[-1] <= 256 and size % 8 == 0 and bool(_varlen_options())


def _attend_varlen(
    q_THD: Tensor, k_TKD: Tensor, v_TKE: Tensor, cu_seqlens: Tensor, longest: int, scale: float
) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    out = varlen_attn(
        q_THD,
        k_TKD.contiguous(),
        v_TKE.contiguous(),
        cu_seqlens,
        cu_seqlens,
        longest,
        longest,
        scale=scale,
        **(_varlen_options() or {}),
    )
    assert not isinstance(out, tuple)
    return out


class Group(NamedTuple):
    """Documents computed together."""

    documents: int
    length: int
    tokens: torch.Tensor | None
    """int64 [B * L] token of each place; padding repeats the document's last token. None: all
    tokens in order."""


class Plan(NamedTuple):
    """How a row is computed."""

    groups: tuple[Group, ...]
    inverse: torch.Tensor | None
    """int64 [T] where in the groups' places, one after the other, each token is; None: in order."""


@lru_cache(maxsize=16)
def plan_groups(lengths: tuple[int, ...], device: torch.device) -> Plan:
    """Group the documents of a row by length. Cached: all layers of a step ask the same."""
    import torch

    if len(set(lengths)) == 1:
        return Plan((Group(len(lengths), lengths[0], None),), None)
    sizes = torch.tensor(lengths)
    starts = sizes.cumsum(0) - sizes
    groups: list[Group] = []
    inverse = torch.empty(int(sizes.sum()), dtype=torch.int64)
    offset = 0
    for chosen in _like_lengths(lengths):
        documents = torch.tensor(chosen)
        longest = int(sizes[documents].max())
        places = torch.arange(longest)
        last = sizes[documents, None] - 1
        index = starts[documents, None] + torch.minimum(places, last)
        is_token = places <= last
        target = offset + torch.arange(index.numel()).view_as(index)
        inverse[index[is_token]] = target[is_token]
        groups.append(Group(len(chosen), longest, index.flatten().to(device)))
        offset += index.numel()
    return Plan(tuple(groups), inverse.to(device))


def _like_lengths(lengths: tuple[int, ...]) -> list[list[int]]:
    """Document numbers in groups of like length, longest first."""
    groups: list[list[int]] = []
    longest = 0
    for document in sorted(range(len(lengths)), key=lambda d: -lengths[d]):
        size = lengths[document]
        if not groups or longest > max(size * PADDING_LIMIT, size + PADDING_TOKENS):
            groups.append([])
            longest = size
        groups[-1].append(document)
    return groups


def _attend_group(q: Tensor, k: Tensor, v: Tensor, group: Group, scale: float) -> Tensor:
    """[B, L, H, E] of one group."""
    import torch.nn.functional as F

    if group.tokens is not None:
        q, k, v = (x.index_select(0, group.tokens) for x in (q, k, v))
    q_BHLD, k_BKLD, v_BKLE = (
        x.unflatten(0, (group.documents, group.length)).transpose(1, 2) for x in (q, k, v)
    )
    out_BHLE = F.scaled_dot_product_attention(
        q_BHLD, k_BKLD, v_BKLE, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out_BHLE.transpose(1, 2)
