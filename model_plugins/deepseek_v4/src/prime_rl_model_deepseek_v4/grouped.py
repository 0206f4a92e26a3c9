"""The first half of the output projection: a matrix of its own for every group of heads.

T tokens, H heads, D head size, G groups, I = H D / G inputs and O outputs of a group.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.layers.float8 import ACTIVATION_GROUP, round_groups
from prime_rl.layers.float8_linear import product_dtype
from prime_rl.layers.float8_weights import WeightScales, round_blocks


class GroupedLinear(nn.Module):
    """Weight [G O, I], the groups' rows one after the other; 8-bit with `scales`.

    8-bit inputs share a scale per token, head and 128 numbers, always a power of two; they are
    rounded from float32, so hand them in as they come out of the last rotation.
    """

    def __init__(
        self, groups: int, inputs: int, outputs: int, scales: WeightScales | None = None
    ) -> None:
        super().__init__()
        self.groups = groups
        self.scales = scales
        self.weight = nn.Parameter(torch.empty(groups * outputs, inputs))

    def forward(self, x_THD: Tensor) -> Tensor:
        """[T, G O] in the weight's dtype."""
        dtype = self.weight.dtype
        weight_GOI = self.weight.unflatten(0, (self.groups, -1))
        if self.scales is None:
            x_THD = x_THD.to(dtype)
        else:
            exact = product_dtype(self.scales, dtype)
            x_THD = round_groups(
                x_THD, ACTIVATION_GROUP, power_of_two=True, amax_floor=1e-10, dtype=exact
            )
            weight_GOI = round_blocks(weight_GOI, self.scales, dtype=exact)
        x_GTI = x_THD.flatten(1).unflatten(1, (self.groups, -1)).transpose(0, 1)
        out_GTO = torch.bmm(x_GTI, weight_GOI.transpose(1, 2))
        return out_GTO.transpose(0, 1).flatten(1).to(dtype)
