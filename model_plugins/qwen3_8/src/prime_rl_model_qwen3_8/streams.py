"""Gated residual streams: how a block reads one input from several streams and writes back.

T tokens, S streams, H hidden size, W = S * H (stream-major), R rank of the reading gates.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.layers.norms import rms_norm_late


class StreamNorm(nn.Module):
    """RMS norm of every stream on its own; the factor is 1 + weight, [W]."""

    def __init__(self, hidden: int, streams: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(streams * hidden))
        self.streams = streams
        self.eps = eps

    def forward(self, x_TW: Tensor) -> Tensor:
        """[T, S, H]"""
        factor_SH = 1 + self.weight.float().view(self.streams, -1)
        return rms_norm_late(x_TW.unflatten(1, (self.streams, -1)), factor_SH, self.eps)


class StreamMixer(nn.Module):
    """Reads one block's input from the streams, and says how strongly each takes its output.

    `down` [R + S, W] fuses the reading gates' first matrix and the writing weights, which share
    their input; without writing it is [R, W].
    """

    def __init__(
        self, hidden: int, streams: int, rank: int, eps: float, *, writes: bool = True
    ) -> None:
        super().__init__()
        self.streams, self.rank, self.writes = streams, rank, writes
        width = streams * hidden
        self.norm = StreamNorm(hidden, streams, eps)
        self.down = nn.Linear(width, rank + streams if writes else rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x_TW: Tensor) -> tuple[Tensor, Tensor]:
        """The block's input [T, H] and the writing weights [T, S] (S = 0 without writing)."""
        normed_TSH = self.norm(x_TW)
        low = self.down(normed_TSH.flatten(1)) / self.streams
        low_TR, write_TS = low.split((self.rank, low.shape[1] - self.rank), dim=1)
        gates_TW = self.up(nn.functional.silu(low_TR)).sigmoid()
        read_TH = (gates_TW.view_as(normed_TSH) * normed_TSH).mean(1)
        return read_TH, 2 * write_TS.sigmoid()


def write(x_TW: Tensor, y_TH: Tensor, weights_TS: Tensor) -> Tensor:
    """Add a block's output to every stream of the state that was read, not normalised."""
    return x_TW + (weights_TS[:, :, None] * y_TH[:, None]).flatten(1)
