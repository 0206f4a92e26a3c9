"""Random start values: drawn in float32 where the generator is, so that a parameter's dtype and
device change no value beyond rounding."""

from __future__ import annotations

import torch
from torch import Tensor


def undrawn(like: Tensor, generator: torch.Generator) -> Tensor:
    """An empty float32 tensor of that shape, to draw into."""
    return torch.empty(like.shape, dtype=torch.float32, device=generator.device)


@torch.no_grad()
def fill_normal(parameter: Tensor, spread: float, generator: torch.Generator) -> None:
    """Normal numbers of mean 0 and standard deviation `spread`, in place."""
    parameter.copy_(undrawn(parameter, generator).normal_(0.0, spread, generator=generator))
