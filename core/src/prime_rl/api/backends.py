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

    Capabilities it declares: devices, dtypes, custom_ops (names for activation checkpointing).
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


GATED_SILU = ExpertActivation()


class MoEBackend(Plugin):
    """The routed experts of one layer.

    Capabilities it declares: devices, dtypes, activations (the kinds it computes),
    activation_limit (True when it clips), padding_multiple, custom_ops, fullgraph.
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
    """Sparse attention over keys that an indexer chose. Capabilities as for attention."""

    @abstractmethod
    def attend(
        self,
        q_THD: Tensor,
        kv_TD: Tensor,
        topk_TN: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        sink_H: Tensor | None,
    ) -> Tensor:
        """Attention of each query over its own key rows.

        q [T, H, D]; kv [S, D] keys shared by all heads; topk int64 [T, N] rows of kv, -1 for none;
        sink [H] an extra logit per head without a value. Returns [T, H, D].
        """
