"""The gated feed-forward block with gate and up fused. T tokens, H hidden, I intermediate."""

from __future__ import annotations

from torch import Tensor, nn

from prime_rl.api.backends import GATED_SILU, ExpertActivation
from prime_rl.layers.float8_linear import make_linear
from prime_rl.layers.float8_weights import WeightScales
from prime_rl.layers.moe_torch import activate


class GatedMLP(nn.Module):
    """down( silu(gate(x)) * up(x) ), clipped where the activation says so; `gate_up.weight` [2I, H]
    has the gate rows first. With `scales` both products are 8-bit."""

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        activation: ExpertActivation = GATED_SILU,
        scales: WeightScales | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = make_linear(hidden, 2 * intermediate, scales)
        self.down = make_linear(intermediate, hidden, scales)

    def forward(self, x_TH: Tensor) -> Tensor:
        result: Tensor = self.down(activate(self.gate_up(x_TH), self.activation))
        return result
