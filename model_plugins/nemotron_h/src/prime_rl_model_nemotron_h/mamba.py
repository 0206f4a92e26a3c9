"""The Mamba-2 mixer.

T tokens, H hidden size, X inner channels, K conv channels, N heads, P channels of a head, G groups,
S state size.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from prime_rl.api.batch import PackedBatch
from prime_rl.layers.causal_conv import causal_conv
from prime_rl.layers.norms import rms_norm_late
from prime_rl_model_nemotron_h.architecture import MambaSettings
from prime_rl_model_nemotron_h.chunks import Chunks
from prime_rl_model_nemotron_h.scan import scan


class Convolution(nn.Module):
    """silu of a depthwise causal convolution, float32 inside, as the servers' kernels."""

    def __init__(self, channels: int, taps: int, has_bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, taps))
        self.bias = nn.Parameter(torch.empty(channels)) if has_bias else None

    def forward(self, x_TK: Tensor, positions_T: Tensor) -> Tensor:
        bias_K = None if self.bias is None else self.bias.float()
        out_TK = causal_conv(x_TK.float(), self.weight.float(), positions_T, bias_K)
        return F.silu(out_TK).to(x_TK.dtype)


class Recurrence(nn.Module):
    """Time steps, decay and state. All of it is float32: a softplus rounded to bfloat16 alone moves
    the model visibly.

    dt = softplus(raw + dt_bias), within the limits; decay exp(-exp(A_log) dt) per head; the state
    takes in dt * x (x) B; y = state C + D x.
    """

    def __init__(self, settings: MambaSettings) -> None:
        super().__init__()
        self.step_limit = settings.step_limit
        heads = settings.heads
        self.A_log = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.D = nn.Parameter(torch.empty(heads, dtype=torch.float32))
        self.dt_bias = nn.Parameter(torch.empty(heads, dtype=torch.float32))

    def forward(
        self, x_TNP: Tensor, b_TGS: Tensor, c_TGS: Tensor, raw_TN: Tensor, chunks: Chunks
    ) -> Tensor:
        """y float32 [T, N, P]."""
        step_TN = F.softplus(raw_TN.float() + self.dt_bias.float())
        low, high = self.step_limit
        if low > 0 or high < math.inf:
            step_TN = step_TN.clamp(low, high)
        x_TNP = x_TNP.float()
        decay_TN = -self.A_log.float().exp() * step_TN
        y_TNP = scan(x_TNP * step_TN[..., None], decay_TN, b_TGS.float(), c_TGS.float(), chunks)
        return torch.addcmul(y_TNP, x_TNP, self.D.float()[:, None])


class GatedNorm(nn.Module):
    """y * silu(z), then an RMS norm within each group of channels; float32 with one rounding."""

    def __init__(self, channels: int, groups: int, eps: float) -> None:
        super().__init__()
        self.groups = groups
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(channels))

    def forward(self, y_TX: Tensor, z_TX: Tensor) -> Tensor:
        gated_TX = y_TX.float() * F.silu(z_TX.float())
        by_group = (self.groups, -1)
        weight = self.weight.float().unflatten(0, by_group)
        normal = rms_norm_late(gated_TX.unflatten(1, by_group), weight, self.eps)
        return normal.flatten(1).to(z_TX.dtype)


class Mamba(nn.Module):
    """Projection to z, x, B, C and dt; convolution; recurrence; gated norm; projection back."""

    def __init__(self, hidden: int, settings: MambaSettings, eps: float) -> None:
        super().__init__()
        self.settings = settings
        self.project = nn.Linear(hidden, settings.projected, bias=False)
        self.conv = Convolution(settings.conv_channels, settings.taps, settings.conv_bias)
        self.recurrence = Recurrence(settings)
        self.norm = GatedNorm(settings.inner, settings.groups, eps)
        self.out = nn.Linear(settings.inner, hidden, bias=False)

    def forward(self, x_TH: Tensor, batch: PackedBatch, chunks: Chunks) -> Tensor:
        settings = self.settings
        z_TX, mixed_TK, raw_TN = self.project(x_TH).split(
            (settings.inner, settings.conv_channels, settings.heads), dim=1
        )
        mixed_TK = self.conv(mixed_TK, batch.positions)
        shared = settings.groups * settings.state
        x_TX, b_T, c_T = mixed_TK.split((settings.inner, shared, shared), dim=1)
        by_group = (settings.groups, settings.state)
        y_TNP = self.recurrence(
            x_TX.unflatten(1, (settings.heads, settings.head_dim)),
            b_T.unflatten(1, by_group),
            c_T.unflatten(1, by_group),
            raw_TN,
            chunks,
        )
        # Servers' scan writes its result in the compute dtype.
        result: Tensor = self.out(self.norm(y_TNP.flatten(1).to(x_TH.dtype), z_TX))
        return result
