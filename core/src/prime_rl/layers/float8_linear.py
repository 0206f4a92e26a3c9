"""Linear layers and experts that multiply the 8-bit numbers their server multiplies.

Forward values are those of the server; gradients are those of an unquantised layer with the rounded
inputs and weights. E experts, T tokens, k experts per token, H hidden, I intermediate.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.api.backends import GATED_SILU, ExpertActivation, MoEBackend
from prime_rl.errors import ConfigError
from prime_rl.layers.float8 import round_activations
from prime_rl.layers.float8_weights import WeightScales, round_blocks


def make_linear(inputs: int, outputs: int, scales: WeightScales | None = None) -> nn.Linear:
    """A linear layer without bias: 8-bit with these scales, or an ordinary one."""
    if scales is None:
        return nn.Linear(inputs, outputs, bias=False)
    return Float8Linear(inputs, outputs, scales)


def rounds_inputs_to_powers(scales: WeightScales) -> bool:
    """Whether the scales of activations are powers of two: they are where those of weights end as
    powers of two."""
    return scales != "exact"


def product_dtype(scales: WeightScales, dtype: torch.dtype) -> torch.dtype:
    """The dtype that holds q s of an 8-bit layer exactly, at least `dtype`."""
    return dtype if rounds_inputs_to_powers(scales) else torch.float32


class Float8Linear(nn.Linear):
    """x W^T of x in groups of 128 inputs and W in blocks of 128 x 128; no bias.

    Products are summed in the dtype of x, but for exact scales in float32; one rounding ends it.
    """

    def __init__(self, inputs: int, outputs: int, scales: WeightScales) -> None:
        super().__init__(inputs, outputs, bias=False)
        self.scales: WeightScales = scales

    def forward(self, x: Tensor) -> Tensor:
        dtype = product_dtype(self.scales, x.dtype)
        rounded = round_activations(x, rounds_inputs_to_powers(self.scales), dtype)
        weight = round_blocks(self.weight, self.scales, dtype=dtype)
        return F.linear(rounded, weight).to(x.dtype)


class Float8Experts(MoEBackend):
    """A back end whose experts are 8-bit: rounds what goes into another back end.

    Inputs of both matrices are rounded per token and 128 numbers, matrices in blocks; the second
    input is rounded by the other back end, which must have the capability `activation_rounding`.
    """

    def __init__(self, inner: MoEBackend, scales: WeightScales) -> None:
        if not inner.capabilities.get("activation_rounding"):
            raise ConfigError(
                f"model.moe.backend: found {inner.config.type!r}, which cannot compute experts in "
                "FP8 (capability activation_rounding); use 'torch', or the model's full precision"
            )
        super().__init__(inner.config)
        self.inner = inner
        self.scales: WeightScales = scales

    def experts(
        self,
        x_TH: Tensor,
        indices_Tk: Tensor,
        weights_Tk: Tensor,
        gate_up_EGH: Tensor,
        down_EHI: Tensor,
        activation: ExpertActivation = GATED_SILU,
    ) -> Tensor:
        is_power = rounds_inputs_to_powers(self.scales)
        dtype = product_dtype(self.scales, x_TH.dtype)
        rounding: Literal["float8", "float8_power_of_two"] = (
            "float8_power_of_two" if is_power else "float8"
        )
        out_TH = self.inner.experts(
            round_activations(x_TH, is_power, dtype),
            indices_Tk,
            weights_Tk.to(dtype),
            round_blocks(gate_up_EGH, self.scales, dtype=dtype),
            round_blocks(down_EHI, self.scales, dtype=dtype),
            replace(activation, rounding=rounding),
        )
        return out_TH.to(x_TH.dtype)
