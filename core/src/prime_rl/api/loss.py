"""The loss contract: flat streams of scored tokens in, per-token loss and metrics out."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prime_rl.api.plugin import Plugin

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """The N tokens that count. Masked tokens have been removed: there is nothing to multiply away."""

    trainer_logprobs: Tensor
    """float32 [N], nats, at the sampling temperature; carries the gradient."""
    inference_logprobs: Tensor
    """float32 [N], nats, as the engine sampled them."""
    advantages: Tensor
    """float32 [N]"""
    segment_ids: Tensor
    """int64 [N], document number inside the row; tokens of a document are contiguous."""
    reference_logprobs: Tensor | None = None
    """float32 [N] when the algorithm asked for a reference."""


@dataclass(frozen=True)
class LossOutput:
    """What a loss returns. Core multiplies by the rl weights, normalises and reduces."""

    loss: Tensor
    """float32 [N]; not averaged."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """float32 or bool [N] each; logged as means over the scored tokens and written to the trace."""
    keep: Tensor | None = None
    """bool [N]; False where the loss dropped the token. None: kept all."""


class Loss(Plugin):
    """The rl component of the training loss.

    Select before `exp`: for any finite inputs, loss and gradient must be finite. N may be 0.
    """

    @abstractmethod
    def compute(self, inputs: LossInputs) -> LossOutput:
        """Per-token loss to be minimised, without the rl weights."""
