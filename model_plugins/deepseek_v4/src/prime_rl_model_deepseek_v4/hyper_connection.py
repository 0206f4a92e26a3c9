"""Hyper-connections: N residual streams, read through one mixture and written through another.

T tokens, N streams, D hidden size, V = N D. Streams are kept in the compute dtype; every map and
every mixture is float32 with one rounding at its end, as servers compute them.

    read:   x = sum_i pre[i] X[i]
    write:  X'[j] = post[j] y + sum_i comb[i, j] X[i]
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl_model_deepseek_v4.architecture import HyperConnectionSizes
from prime_rl_model_deepseek_v4.sinkhorn import sinkhorn


class HyperConnection(nn.Module):
    """The maps (pre, post, comb) of one sub-layer, from all streams; float32."""

    def __init__(self, hidden: int, sizes: HyperConnectionSizes, norm_eps: float) -> None:
        super().__init__()
        self.sizes, self.norm_eps = sizes, norm_eps
        streams = sizes.streams
        maps = (2 + streams) * streams
        self.fn = nn.Parameter(torch.empty(maps, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(maps, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(3, dtype=torch.float32))

    def forward(self, streams_TND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """pre [T, N], post [T, N] and comb [T, N, N]; comb's rows are the streams it reads."""
        streams, eps = self.sizes.streams, self.sizes.eps
        mix = _mix(streams_TND, self.fn.float(), self.norm_eps)
        pre, post, comb = mix.split((streams, streams, streams * streams), dim=-1)
        parts = self.base.float().split((streams, streams, streams * streams))
        scale = self.scale.float()
        pre_TN = torch.sigmoid(pre * scale[0] + parts[0]) + eps
        post_TN = 2 * torch.sigmoid(post * scale[1] + parts[1])
        comb_TNN = (comb * scale[2] + parts[2]).unflatten(-1, (streams, streams))
        start_TNN = comb_TNN.softmax(dim=-1) + eps
        return pre_TN, post_TN, sinkhorn(start_TNN, self.sizes.sinkhorn_iterations, eps)


class StreamHead(nn.Module):
    """How the streams are read behind the last layer; float32."""

    def __init__(self, hidden: int, sizes: HyperConnectionSizes, norm_eps: float) -> None:
        super().__init__()
        self.eps, self.norm_eps = sizes.eps, norm_eps
        streams = sizes.streams
        self.fn = nn.Parameter(torch.empty(streams, streams * hidden, dtype=torch.float32))
        self.base = nn.Parameter(torch.empty(streams, dtype=torch.float32))
        self.scale = nn.Parameter(torch.empty(1, dtype=torch.float32))

    def forward(self, streams_TND: Tensor) -> Tensor:
        """pre [T, N]."""
        mix = _mix(streams_TND, self.fn.float(), self.norm_eps)
        return torch.sigmoid(mix * self.scale.float() + self.base.float()) + self.eps


class ReadNorm(nn.Module):
    """Reads the streams and normalises: the mean square is that of the float32 mixture, what it
    divides is the mixture rounded to the streams' dtype."""

    def __init__(self, hidden: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden))
        self.eps = eps

    def forward(self, streams_TND: Tensor, pre_TN: Tensor) -> Tensor:
        """[T, D] in the streams' dtype."""
        mixed_TD = read(streams_TND, pre_TN)
        inverse_T1 = torch.rsqrt(mixed_TD.square().mean(-1, keepdim=True) + self.eps)
        rounded_TD = mixed_TD.to(streams_TND.dtype).float()
        return (rounded_TD * inverse_T1 * self.weight.float()).to(streams_TND.dtype)


def read(streams_TND: Tensor, pre_TN: Tensor) -> Tensor:
    """The mixture of the streams, float32 [T, D]."""
    return (pre_TN[..., None] * streams_TND.float()).sum(dim=1)


def write(streams_TND: Tensor, y_TD: Tensor, post_TN: Tensor, comb_TNN: Tensor) -> Tensor:
    """The streams behind a sub-layer whose output is y."""
    result: Tensor = _Write.apply(streams_TND, y_TD, post_TN, comb_TNN)
    return result


class _Write(torch.autograd.Function):
    """Keeps its inputs in their own dtypes, where composed operations would keep float32 copies of
    all streams. Forward multiplies element by element, so that no matrix unit rounds the maps."""

    @staticmethod
    def forward(ctx: Any, streams: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
        ctx.save_for_backward(streams, y, post, comb)
        out = post[..., None] * y[:, None].float()
        for i in range(streams.shape[1]):
            out.addcmul_(comb[:, i, :, None], streams[:, i, None].float())
        # A copy, also where the dtype is the same: traced blocks would have no gradients.
        return out.to(streams.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, ...]:
        streams, y, post, comb = ctx.saved_tensors
        g_TND = upstream[0].float()
        d_streams = torch.bmm(comb, g_TND).to(streams.dtype)
        d_comb = torch.bmm(streams.float(), g_TND.transpose(1, 2))
        d_y = torch.bmm(post[:, None], g_TND)[:, 0].to(y.dtype)
        d_post = torch.bmm(g_TND, y.float()[..., None])[..., 0]
        return d_streams, d_y, d_post, d_comb


def _mix(streams_TND: Tensor, fn_MV: Tensor, eps: float) -> Tensor:
    """Products of fn with the streams, one after the other, divided by their root mean square."""
    flat_TV = streams_TND.float().flatten(1)
    inverse_T1 = torch.rsqrt(flat_TV.square().mean(-1, keepdim=True) + eps)
    return F.linear(flat_TV, fn_MV) * inverse_T1
