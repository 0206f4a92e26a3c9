"""Depthwise causal convolution over packed documents. T tokens, C channels, K taps."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def causal_conv(
    x_TC: Tensor,
    weight_CK: Tensor,
    positions_T: Tensor,
    bias_C: Tensor | None = None,
    dilation: int = 1,
) -> Tensor:
    """y[t] = bias + sum over k of weight[:, k] * x[t - (K - 1 - k) * dilation].

    `positions` restart at 0 in every document: what lies before a document's start counts as zero.
    Returns [T, C] in x's dtype.
    """
    taps = weight_CK.shape[1]
    out_TC = x_TC * weight_CK[:, taps - 1]
    for lag in range(1, taps):
        distance = lag * dilation
        if distance >= x_TC.shape[0]:
            break
        earlier_TC = F.pad(x_TC[:-distance], (0, 0, distance, 0))
        is_inside = (positions_T >= distance).unsqueeze(1)
        # where, not a product: whatever another document holds, even inf, must not show.
        earlier_TC = torch.where(is_inside, earlier_TC, 0)
        out_TC = torch.addcmul(out_TC, earlier_TC, weight_CK[:, taps - 1 - lag])
    return out_TC if bias_C is None else out_TC + bias_C
