"""A back end that remembers what the indexers chose and what attention was given."""

from typing import Any

import torch
from torch import Tensor

from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig


class RecordingDSA(TorchDSA):
    """The reference, and what passed through it."""

    def __init__(self) -> None:
        super().__init__(TorchDSAConfig())
        self.selected: list[Tensor] = []
        self.dtypes: list[dict[str, torch.dtype]] = []

    def select(self, *arguments: Any) -> Tensor:
        self.selected.append(super().select(*arguments))
        return self.selected[-1]

    def attend(self, q_THD: Tensor, k_SKD: Tensor, *rest: Any, **named: Any) -> Tensor:
        found = super().attend(q_THD, k_SKD, *rest, **named)
        tensors = {"q": q_THD, "k": k_SKD, "sink": named["sink_H"], "out": found}
        self.dtypes.append({name: tensor.dtype for name, tensor in tensors.items()})
        return found
