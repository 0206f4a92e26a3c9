"""Core's MoE back end `torch`: tokens sorted by expert, one matrix product per expert.

T tokens, k experts per token, E experts, H hidden, I intermediate, N = T * k rows in expert order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from prime_rl.api.backends import GATED_SILU, ExpertActivation, MoEBackend
from prime_rl.api.plugin import Capabilities
from prime_rl.configs.base import PluginConfig

if TYPE_CHECKING:
    from torch import Tensor


class TorchMoEConfig(PluginConfig):
    """Nothing to set."""

    type: Literal["torch"] = "torch"


class TorchMoE(MoEBackend):
    """The reference experts on any device: grouped products on CUDA, a loop elsewhere.

    Deterministic: rows are moved by permutations only and a token's experts are summed in order.
    """

    Config = TorchMoEConfig
    capabilities: ClassVar[Capabilities] = {
        "devices": ("cpu", "cuda"),
        "dtypes": ("float32", "bfloat16", "float16"),
        "activations": ("gated_silu", "squared_relu"),
        "activation_limit": True,
        "activation_rounding": True,
    }

    def experts(
        self,
        x_TH: Tensor,
        indices_Tk: Tensor,
        weights_Tk: Tensor,
        gate_up_EGH: Tensor,
        down_EHI: Tensor,
        activation: ExpertActivation = GATED_SILU,
    ) -> Tensor:
        tokens, per_token = indices_Tk.shape
        order_N = indices_Tk.flatten().argsort(stable=True)
        counts_E = indices_Tk.flatten().bincount(minlength=gate_up_EGH.shape[0])
        # Repeat, then permute: the backward of a permutation adds nothing twice, so it is exact
        # in any order, where gathering rows k times over would use atomic additions on a GPU.
        repeated_NH = x_TH[:, None].expand(-1, per_token, -1).reshape(-1, x_TH.shape[1])
        rows_NH = repeated_NH.index_select(0, order_N)
        product = _choose_product(x_TH, counts_E)
        inner_NI = activate(product(rows_NH, gate_up_EGH), activation)
        out_NH = product(inner_NI, down_EHI)
        place_N = order_N.argsort()
        out_TkH = out_NH.index_select(0, place_N).view(tokens, per_token, out_NH.shape[1])
        return (out_TkH * weights_Tk.to(x_TH.dtype)[..., None]).sum(1)


def activate(rows_NG: Tensor, activation: ExpertActivation) -> Tensor:
    """[N, I] of [N, 2I], or of [N, I] without a gate."""
    inner_NI = _function(rows_NG, activation)
    if activation.rounding == "none":
        return inner_NI
    from prime_rl.layers.float8 import round_activations

    return round_activations(inner_NI, activation.rounding == "float8_power_of_two")


def _function(rows_NG: Tensor, activation: ExpertActivation) -> Tensor:
    import torch.nn.functional as F

    if activation.kind == "squared_relu":
        return F.relu(rows_NG).square()
    gate_NI, up_NI = rows_NG.chunk(2, dim=-1)
    if activation.limit is not None:
        gate_NI = gate_NI.clamp(max=activation.limit)
        up_NI = up_NI.clamp(-activation.limit, activation.limit)
    return F.silu(gate_NI) * up_NI


class _LoopProduct:
    """rows @ matrix[e].T for the rows of each expert in turn; idle experts are skipped."""

    def __init__(self, counts_E: Tensor) -> None:
        self.counts: list[int] = counts_E.tolist()

    def __call__(self, rows_NA: Tensor, matrices_EBA: Tensor) -> Tensor:
        import torch

        # unbind: one gradient for the whole stack, where indexing would make one per expert.
        pairs = zip(rows_NA.split(self.counts), matrices_EBA.unbind(0), strict=True)
        products = [rows @ matrix.T for rows, matrix in pairs if rows.shape[0]]
        if not products:
            return rows_NA @ matrices_EBA[0].T
        return torch.cat(products)


class _GroupedProduct:
    """The same in one kernel, without telling the host how many rows an expert has."""

    def __init__(self, counts_E: Tensor) -> None:
        import torch

        self.ends_E = counts_E.cumsum(0).to(torch.int32)

    def __call__(self, rows_NA: Tensor, matrices_EBA: Tensor) -> Tensor:
        import torch.nn.functional as F

        return F.grouped_mm(rows_NA, matrices_EBA.transpose(1, 2), offs=self.ends_E)


def _choose_product(x_TH: Tensor, counts_E: Tensor) -> _LoopProduct | _GroupedProduct:
    import torch

    aligned = x_TH.shape[1] % 8 == 0  # the kernel wants rows of whole 16-byte units
    if x_TH.is_cuda and x_TH.dtype == torch.bfloat16 and aligned and x_TH.shape[0] > 0:
        return _GroupedProduct(counts_E)
    return _LoopProduct(counts_E)
