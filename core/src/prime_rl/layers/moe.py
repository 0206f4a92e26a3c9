"""The mixture-of-experts block of every family: a router, stacked experts, maybe a shared expert.

T tokens, k experts per token, E experts, H hidden, I intermediate, G gate and up rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.api.backends import GATED_SILU, ExpertActivation, MoEBackend
from prime_rl.api.batch import PackedBatch
from prime_rl.layers.routing import record


@dataclass(frozen=True)
class RouterSettings:
    """How experts are chosen and weighed.

    score = scoring(x W^T) in float32; the k largest of score + selection bias are chosen; weights
    are the scores of the chosen, without bias, divided by their sum if `normalise`, times `scale`.
    """

    experts: int
    per_token: int
    scoring: Literal["softmax", "sigmoid", "sqrt_softplus"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    has_selection_bias: bool = False
    groups: int = 1
    """Experts form this many equal groups; a group is rated by the sum of its two best."""
    top_groups: int = 1
    """Only experts of the best groups can be chosen."""


class Router(nn.Module):
    """Chooses experts. Computes logits in its weight's dtype, everything after in float32."""

    def __init__(self, hidden: int, settings: RouterSettings) -> None:
        super().__init__()
        self.settings = settings
        self.weight = nn.Parameter(torch.empty(settings.experts, hidden))
        bias_E = None
        if settings.has_selection_bias:
            bias_E = torch.zeros(settings.experts, dtype=torch.float32)
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", bias_E)

    def forward(self, x_TH: Tensor, routes_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(indices int64 [T, k], weights float32 [T, k]).

        `routes` replays recorded experts in the rows whose first entry is not -1; their weights are
        computed from the live scores, with gradient.
        """
        logits_TE = F.linear(x_TH.to(self.weight.dtype), self.weight).float()
        scores_TE = _score(logits_TE, self.settings.scoring)
        indices_Tk = self._choose(scores_TE.detach())
        if routes_Tk is not None:
            indices_Tk = torch.where(routes_Tk[:, :1] >= 0, routes_Tk, indices_Tk)
        weights_Tk = scores_TE.gather(1, indices_Tk)
        if self.settings.normalise:
            weights_Tk = weights_Tk / (weights_Tk.sum(-1, keepdim=True) + 1e-20)
        return indices_Tk, weights_Tk * self.settings.scale

    def _choose(self, scores_TE: Tensor) -> Tensor:
        settings = self.settings
        if self.selection_bias is not None:
            scores_TE = scores_TE + self.selection_bias
        if settings.groups > 1:
            by_group = scores_TE.unflatten(1, (settings.groups, -1))
            rating_TG = by_group.topk(2, dim=-1).values.sum(-1)
            best = rating_TG.topk(settings.top_groups, dim=-1).indices
            allowed = torch.zeros_like(rating_TG, dtype=torch.bool).scatter_(1, best, True)
            scores_TE = by_group.masked_fill(~allowed[..., None], -torch.inf).flatten(1)
        return scores_TE.topk(settings.per_token, dim=-1).indices


class Experts(nn.Module):
    """The routed experts of one layer: `gate_up` [E, 2I, H] with the gate rows first ([E, I, H] for
    an activation without gate) and `down` [E, H, I].

    A module of its own, so that ranks may divide the experts between them: `exchange` then sends
    tokens to where their experts are.
    """

    exchange: Callable[[Experts, Tensor, Tensor, Tensor], Tensor] | None = None

    def __init__(
        self,
        count: int,
        hidden: int,
        intermediate: int,
        backend: MoEBackend,
        activation: ExpertActivation = GATED_SILU,
    ) -> None:
        super().__init__()
        inner = intermediate if activation.kind == "squared_relu" else 2 * intermediate
        self.backend = backend
        self.activation = activation
        self.gate_up = nn.Parameter(torch.empty(count, inner, hidden))
        self.down = nn.Parameter(torch.empty(count, hidden, intermediate))

    def forward(self, x_TH: Tensor, indices_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """sum over the chosen experts of weight * expert(x): [T, H]."""
        if self.exchange is not None:
            return self.exchange(self, x_TH, indices_Tk, weights_Tk)
        return self.backend.experts(
            x_TH, indices_Tk, weights_Tk, self.gate_up, self.down, self.activation
        )


class MoEBlock(nn.Module):
    """Routed experts plus what is shared by all tokens.

    `shared` is a module that every token passes, added unscaled; with `shared_gate` its output is
    multiplied by sigmoid(w x). `expert_hidden` is the width of what the experts read and write when
    a subclass's `mix` projects it.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        router: RouterSettings,
        layer: int,
        backend: MoEBackend,
        activation: ExpertActivation = GATED_SILU,
        shared: nn.Module | None = None,
        shared_gate: bool = False,
        expert_hidden: int | None = None,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.router = Router(hidden, router)
        width = hidden if expert_hidden is None else expert_hidden
        self.experts = Experts(router.experts, width, intermediate, backend, activation)
        self.shared = shared
        self.shared_gate = nn.Linear(hidden, 1, bias=False) if shared_gate else None

    def forward(self, x_TH: Tensor, routes_Tk: Tensor | None = None) -> Tensor:
        """[T, H]; `routes` as the router's."""
        indices_Tk, weights_Tk = self.router(x_TH, routes_Tk)
        record(self.layer, indices_Tk)
        out_TH = self.mix(x_TH, indices_Tk, weights_Tk.to(x_TH.dtype))
        if self.shared is None:
            return out_TH
        shared_TH = self.shared(x_TH)
        if self.shared_gate is not None:
            shared_TH = shared_TH * self.shared_gate(x_TH).sigmoid()
        return out_TH + shared_TH

    def mix(self, x_TH: Tensor, indices_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
        """The routed part; families that compress what experts see override it."""
        result: Tensor = self.experts(x_TH, indices_Tk, weights_Tk)
        return result


def routes_by_layer(batch: PackedBatch, layers: int, per_token: int) -> list[Tensor | None]:
    """The experts to replay, [T, k] per global layer number; None where nothing is recorded.

    Raises ValueError when the recording was made by a model with other layers or top-k.
    """
    routes = batch.routed_experts
    if routes is None:
        return [None] * layers
    expected = (batch.input_ids.shape[0], layers, per_token)
    if tuple(routes.shape) != expected:
        raise ValueError(
            f"routed_experts has shape {list(routes.shape)}, expected {list(expected)}: tokens, "
            "all layers of the model (dense ones included), experts per token"
        )
    return list(routes.unbind(1))


def _score(logits_TE: Tensor, scoring: str) -> Tensor:
    if scoring == "softmax":
        return logits_TE.softmax(-1)
    if scoring == "sigmoid":
        return logits_TE.sigmoid()
    return F.softplus(logits_TE).sqrt()
