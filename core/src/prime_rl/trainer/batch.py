"""Packed rows as tensors: what one forward and backward needs, and nothing that does not count.

T tokens of a row, N scored tokens, M members of one loss component.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prime_rl.api import PackedBatch
from prime_rl.errors import RunError
from prime_rl.trainer.logprobs import KeptTokens
from prime_rl.trainer.streams import Array, Streams


@dataclass(frozen=True)
class Members:
    """The tokens of one loss component."""

    index: Tensor | None
    """int64 [M] places among the scored tokens; None: all of them."""
    weights: Tensor | None
    """float32 [M]; None: all 1."""

    def take(self, stream_N: Tensor) -> Tensor:
        """[M] values of the members."""
        return stream_N if self.index is None else stream_N[self.index]


@dataclass(frozen=True)
class Row:
    """One packed row on the trainer's device."""

    packed: PackedBatch
    sources: Tensor
    """int64 [N] positions whose states predict the scored tokens."""
    targets: Tensor
    """int64 [N] the scored tokens."""
    temperatures: Tensor
    """float32 [N]"""
    segment_ids: Tensor
    """int64 [N] document number."""
    kept: KeptTokens | None
    inference_logprobs: Tensor | None
    """float32 [N]"""
    advantages: Tensor | None
    reference_logprobs: Tensor | None
    rl: Members | None
    """None: no token of the row is a member."""
    ce: Members | None
    ref_kl: Members | None
    env_ids: Tensor | None
    """int64 [N] index into the environments' names; None: one environment."""
    streams: Streams
    """The row on the host."""

    @property
    def count(self) -> int:
        """Number of scored tokens."""
        return self.targets.shape[0]


def build_row(streams: Streams, device: torch.device, replay_routing: bool = False) -> Row:
    """Select, check and move a row. Runs in the background thread.

    Raises RunError naming the stream that is unusable.
    """
    streams.check()
    scored = streams.scored

    def move(values: Array, dtype: torch.dtype) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(values)).to(dtype)
        return tensor.to(device, non_blocking=True)

    def stream(values: Array | None) -> Tensor | None:
        return None if values is None else move(values[scored], torch.float32)

    def members(is_member: Array, weights: Array | None) -> Members | None:
        places = np.flatnonzero(is_member[scored])
        if not len(places):
            return None
        everyone = len(places) == len(scored)
        return Members(
            index=None if everyone else move(places, torch.int64),
            weights=None if weights is None else move(weights[scored][places], torch.float32),
        )

    environments = np.asarray(streams.document_envs or [0] * len(streams.lengths))
    several = len(set(environments.tolist())) > 1
    return Row(
        packed=_packed(streams, device, replay_routing),
        sources=move(scored - 1, torch.int64),
        targets=move(streams.input_ids[scored], torch.int64),
        temperatures=move(streams.temperatures[scored], torch.float32),
        segment_ids=move(streams.segment_ids[scored], torch.int64),
        kept=_kept(streams, device),
        inference_logprobs=stream(streams.inference_logprobs),
        advantages=stream(streams.advantages),
        reference_logprobs=stream(streams.ref_logprobs),
        rl=members(streams.rl_members, streams.rl_weights),
        ce=members(streams.ce_members, streams.ce_weights),
        ref_kl=members(streams.ref_kl_members, streams.ref_kl_weights),
        env_ids=move(environments[streams.segment_ids[scored]], torch.int64) if several else None,
        streams=streams,
    )


def _packed(streams: Streams, device: torch.device, replay_routing: bool) -> PackedBatch:
    borders = np.cumsum((0, *streams.lengths))
    positions = np.arange(len(streams.input_ids)) - np.repeat(borders[:-1], streams.lengths)
    return PackedBatch(
        input_ids=torch.from_numpy(streams.input_ids.astype(np.int64)).to(device),
        positions=torch.from_numpy(positions.astype(np.int64)).to(device),
        cu_seqlens=torch.from_numpy(borders.astype(np.int32)).to(device),
        lengths=streams.lengths,
        routed_experts=_routes(streams, device) if replay_routing else None,
    )


def _routes(streams: Streams, device: torch.device) -> Tensor | None:
    routed = streams.routed_experts
    if routed is None:
        return None
    if routed.shape[0] != len(streams.input_ids):
        raise RunError(
            f"routed_experts has {routed.shape[0]} rows for {len(streams.input_ids)} tokens"
        )
    stored = np.frombuffer(routed.data, f"<{np.dtype(routed.dtype).str[1:]}")
    indices = stored.reshape(routed.shape).astype(np.int64)
    indices[indices == np.iinfo(stored.dtype).max] = -1
    return torch.from_numpy(indices).to(device)


def _kept(streams: Streams, device: torch.device) -> KeptTokens | None:
    """The kept candidates of the scored tokens. Raises RunError when one lacks the token itself."""
    mask = streams.sampling_mask
    if mask is None:
        return None
    counts = np.frombuffer(mask.counts, "<i4")
    ids = np.frombuffer(mask.ids, "<i4")
    if len(counts) != len(streams.input_ids) or counts.sum() != len(ids):
        raise RunError(
            f"sampling_mask has {len(counts)} rows and {len(ids)} ids for "
            f"{len(streams.input_ids)} tokens and {counts.sum()} counted ids"
        )
    is_scored = np.zeros(len(counts), dtype=bool)
    is_scored[streams.scored] = True
    chosen = ids[np.repeat(is_scored, counts)]
    chosen_counts = counts[streams.scored]
    rows = np.repeat(np.arange(len(chosen_counts)), chosen_counts)
    has_target = np.zeros(len(chosen_counts), dtype=bool)
    has_target[rows[chosen == streams.input_ids[streams.scored][rows]]] = True
    lacking = np.flatnonzero(~has_target & (chosen_counts > 0))
    if len(lacking):
        raise RunError(
            f"sampling_mask: the sampled token is not among the kept candidates at "
            f"{len(lacking)} positions, the first is {streams.scored[lacking[0]]}"
        )
    return KeptTokens(
        ids_M=torch.from_numpy(chosen.astype(np.int64)).to(device),
        rows_M=torch.from_numpy(rows.astype(np.int64)).to(device),
        borders=tuple(np.cumsum((0, *chosen_counts)).tolist()),
    )
