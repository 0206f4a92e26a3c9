"""Contracts of the compute back ends: pure functions over packed tensors."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from prime_rl.api.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


class AttentionBackend(Plugin):
    """Softmax attention within documents.

    Capabilities it declares: devices, dtypes, custom_ops (names of its custom operators: with some,
    it stays in compiled graphs).
    """

    @abstractmethod
    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKE: Tensor,
        cu_seqlens: Tensor,
        lengths: tuple[int, ...],
        scale: float,
    ) -> Tensor:
        """Causal attention inside each document.

        q [T, H, D], k [T, K, D], v [T, K, E] with H a multiple of K (query head h reads key head
        h // (H / K)); cu_seqlens int32 [docs + 1]. Returns [T, H, E] in q's dtype.
        """


@dataclass(frozen=True)
class ExpertActivation:
    """The function between the two matrices of an expert."""

    kind: Literal["gated_silu", "squared_relu"] = "gated_silu"
    """gated_silu: silu(gate) * up. squared_relu: relu(up)^2, without a gate."""
    limit: float | None = None
    """gated_silu only: gate is clipped from above, up on both sides, before the function."""
    rounding: Literal["none", "float8", "float8_power_of_two"] = "none"
    """Whether what enters the second matrix is rounded to e4m3 numbers with a scale per row and 128
    numbers, exact or a power of two (`layers.float8.round_activations`); gradients pass it."""


GATED_SILU = ExpertActivation()


class MoEBackend(Plugin):
    """The routed experts of one layer.

    Capabilities it declares: devices, dtypes, activations (the kinds it computes),
    activation_limit (True when it clips), activation_rounding (True when it rounds), padding_multiple,
    custom_ops, fullgraph.
    """

    padding_multiple: ClassVar[int] = 1
    """Rows per expert are padded to a multiple of this inside the back end."""

    @abstractmethod
    def experts(
        self,
        x_TH: Tensor,
        indices_Tk: Tensor,
        weights_Tk: Tensor,
        gate_up_EGH: Tensor,
        down_EHI: Tensor,
        activation: ExpertActivation = GATED_SILU,
    ) -> Tensor:
        """sum over the k chosen experts e of weight * down_e( silu(gate_e x) * (up_e x) ).

        x [T, H]; indices int64 [T, k] in [0, E), distinct in a row; weights [T, k]; gate_up
        [E, 2I, H] with the I gate rows first ([E, I, H] for an activation without gate); down
        [E, H, I]. Returns [T, H] in x's dtype. Differentiable in x, weights and both matrices;
        tokens per expert may be 0, T may be 0.
        """


class DSABackend(Plugin):
    """Sparse attention: an indexer picks key rows for each query, attention reads only those.

    Capabilities as for attention. T queries, S key rows; both are pure functions.
    """

    @abstractmethod
    def select(
        self,
        q_TJD: Tensor,
        k_SD: Tensor,
        w_TJ: Tensor,
        first_T: Tensor,
        last_T: Tensor,
        top_k: int,
    ) -> Tensor:
        """For each query the rows of k that the indexer rates highest, without gradient.

        score(t, s) = sum_j w[t, j] * relu(q[t, j] . k[s]) in float32, for rows with
        first[t] <= s < last[t] only: the part of the query's own document that it may see. Index
        heads J, w float32 or q's dtype; first and last int64 [T]. Returns int64 [T, min(top_k, S)]
        in any order, filled up with -1. S may be 0. Which of equal scores are taken must not depend
        on other documents (many are exactly 0).
        """

    @abstractmethod
    def attend(
        self,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKE: Tensor | None,
        rows_TN: Tensor,
        scale: float,
        sink_H: Tensor | None = None,
        value_size: int | None = None,
    ) -> Tensor:
        """Softmax attention of each query over its own key rows.

        q [T, H, D]; k [S, K, D] with H a multiple of K (query head h reads key head h // (H / K));
        v [S, K, E], or None: values are the first `value_size` numbers of the key rows (one cached
        row serves as both). rows int64 [T, N], distinct, -1 for none. sink [H] is an extra logit
        per head, unscaled and without a value. Softmax is float32. Returns [T, H, E] in q's dtype;
        a query without rows gives 0. Differentiable in q, k, v and sink.
        """
