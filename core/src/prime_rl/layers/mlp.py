"""The gated feed-forward block with gate and up fused. T tokens, H hidden, I intermediate."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class GatedMLP(nn.Module):
    """down( silu(gate(x)) * up(x) ); `gate_up.weight` [2I, H] has the gate rows first."""

    def __init__(self, hidden: int, intermediate: int) -> None:
        super().__init__()
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x_TH: Tensor) -> Tensor:
        gate_TI, up_TI = self.gate_up(x_TH).chunk(2, dim=-1)
        result: Tensor = self.down(F.silu(gate_TI) * up_TI)
        return result
