"""Per-token streams of one packed row on the host, and which of its tokens each loss counts.

S tokens in K documents. Streams are position-aligned: entry t belongs to token t, which the state
at t - 1 predicts; the first token of a document is therefore never scored.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from prime_rl.errors import RunError
from prime_rl.wire import MicroBatch, RoutedExperts, SamplingMask

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Totals:
    """Sums over rows; adds up over micro-batches and ranks."""

    rl: float = 0.0
    """Sum of the rl weights of members."""
    ce: float = 0.0
    """Number of members."""
    ref_kl: float = 0.0
    """Number of members."""
    tokens: float = 0.0
    """Tokens without padding."""
    scored: float = 0.0
    """Tokens that any component counts."""
    documents: float = 0.0
    """Documents without padding."""

    def __add__(self, other: Totals) -> Totals:
        return Totals(*(a + b for a, b in zip(self.as_list(), other.as_list(), strict=True)))

    def as_list(self) -> list[float]:
        """The fields in order, for a reduction over ranks."""
        return [self.rl, self.ce, self.ref_kl, self.tokens, self.scored, self.documents]


@dataclass(frozen=True)
class Streams:
    """One row. None: the stream is absent."""

    input_ids: Array
    """int [S]"""
    lengths: tuple[int, ...]
    """[K]"""
    loss_mask: Array
    """bool [S]"""
    temperatures: Array
    """float32 [S]"""
    inference_logprobs: Array | None = None
    """float32 [S]"""
    advantages: Array | None = None
    rl_weights: Array | None = None
    ce_weights: Array | None = None
    ref_kl_weights: Array | None = None
    ref_logprobs: Array | None = None
    routed_experts: RoutedExperts | None = None
    sampling_mask: SamplingMask | None = None
    env_names: tuple[str, ...] = ("",)
    document_envs: tuple[int, ...] = ()
    """[K] index into env_names; empty: all 0."""
    trace_ids: tuple[str, ...] = ()
    """[K] "" when unknown; empty: all unknown."""
    branch_indices: tuple[int, ...] = ()
    padding_tokens: int = 0
    """Tokens of the last document that are padding."""

    @classmethod
    def from_micro_batch(cls, row: MicroBatch) -> Streams:
        """Views of the record's bytes. Raises RunError naming a stream of the wrong length."""
        count = sum(row.lengths)

        def view(name: str, dtype: str) -> Array:
            data = getattr(row, name)
            size = np.dtype(dtype).itemsize
            if len(data) != count * size:
                raise RunError(
                    f"batch from the orchestrator: {name} has {len(data) / size:g} entries, "
                    f"the documents have {count} tokens"
                )
            return np.frombuffer(data, dtype)

        def optional(name: str) -> Array | None:
            return None if getattr(row, name) is None else view(name, "<f4")

        for name in ("document_envs", "trace_ids", "branch_indices"):
            if len(getattr(row, name)) != len(row.lengths):
                raise RunError(
                    f"batch from the orchestrator: {name} has {len(getattr(row, name))} entries "
                    f"for {len(row.lengths)} documents"
                )
        return cls(
            input_ids=view("input_ids", "<i4"),
            lengths=tuple(row.lengths),
            loss_mask=view("loss_mask", "u1") != 0,
            temperatures=view("temperatures", "<f4"),
            inference_logprobs=view("inference_logprobs", "<f4"),
            advantages=optional("advantages"),
            rl_weights=optional("rl_weights"),
            ce_weights=optional("ce_weights"),
            ref_kl_weights=optional("ref_kl_weights"),
            ref_logprobs=optional("ref_logprobs"),
            routed_experts=row.routed_experts,
            sampling_mask=row.sampling_mask,
            env_names=tuple(row.env_names),
            document_envs=tuple(row.document_envs),
            trace_ids=tuple(row.trace_ids),
            branch_indices=tuple(row.branch_indices),
            padding_tokens=row.padding_tokens,
        )

    @cached_property
    def segment_ids(self) -> Array:
        """int64 [S] document number of every token."""
        return np.repeat(np.arange(len(self.lengths)), self.lengths)

    @cached_property
    def _can_train(self) -> Array:
        """bool [S]; False at the first token of every document."""
        allowed = np.ones(len(self.input_ids), dtype=bool)
        allowed[np.cumsum((0, *self.lengths[:-1]))] = False
        return allowed

    @cached_property
    def rl_members(self) -> Array:
        """bool [S] loss_mask and rl weight != 0."""
        members = self.loss_mask & self._can_train
        return members if self.rl_weights is None else members & (self.rl_weights != 0)

    @cached_property
    def ce_members(self) -> Array:
        """bool [S] ce weight != 0."""
        return self._weighted(self.ce_weights)

    @cached_property
    def ref_kl_members(self) -> Array:
        """bool [S] ref_kl weight != 0."""
        return self._weighted(self.ref_kl_weights)

    def _weighted(self, weights: Array | None) -> Array:
        if weights is None:
            return np.zeros(len(self.input_ids), dtype=bool)
        return (weights != 0) & self._can_train

    @cached_property
    def scored(self) -> Array:
        """int64 [N] positions that some component counts."""
        return np.flatnonzero(self.rl_members | self.ce_members | self.ref_kl_members)

    @cached_property
    def totals(self) -> Totals:
        """What this row adds to the denominators and counters of its step."""
        rl = self.rl_members.sum()
        if self.rl_weights is not None:
            rl = self.rl_weights[self.rl_members].sum(dtype=np.float64)
        return Totals(
            rl=float(rl),
            ce=float(self.ce_members.sum()),
            ref_kl=float(self.ref_kl_members.sum()),
            tokens=float(len(self.input_ids) - self.padding_tokens),
            scored=float(len(self.scored)),
            documents=float(len(self.lengths) - (self.padding_tokens > 0)),
        )

    def check(self) -> None:
        """Raise RunError naming a stream that is absent or not finite where a component needs it.

        Values at tokens that nothing counts are not looked at: they never enter the computation.
        """
        rl, ref_kl = self.rl_members, self.ref_kl_members
        self._check("advantages", rl)
        self._check("inference_logprobs", rl | ref_kl)
        self._check("ref_logprobs", ref_kl)
        if self.ref_logprobs is not None:
            self._check("ref_logprobs", rl)
        for name in ("rl_weights", "ce_weights", "ref_kl_weights"):
            if getattr(self, name) is not None:
                self._check(name, self.rl_members | self.ce_members | self.ref_kl_members)
        temperatures = self.temperatures[self.scored]
        if not (np.isfinite(temperatures) & (temperatures > 0)).all():
            raise RunError(
                "temperatures: expected finite values above 0 at trained tokens, found "
                f"{temperatures[~(np.isfinite(temperatures) & (temperatures > 0))][0]}"
            )

    def _check(self, name: str, members: Array) -> None:
        count = int(members.sum())
        if count == 0:
            return
        stream = getattr(self, name)
        if stream is None:
            raise RunError(f"{name}: {count} tokens need this stream, and the batch has none")
        bad = np.flatnonzero(members & ~np.isfinite(stream))
        if len(bad):
            raise RunError(
                f"{name}: {len(bad)} trained tokens have a value that is not finite "
                f"({stream[bad[0]]} at position {bad[0]} of a row of {len(stream)})"
            )
