"""Back ends without any batching: slow, and their arithmetic is that of the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_rl.api.backends import GATED_SILU, AttentionBackend, ExpertActivation, MoEBackend
from prime_rl.configs.base import PluginConfig

if TYPE_CHECKING:
    from torch import Tensor


class CountedAttention(AttentionBackend):
    """One query at a time against the keys it may see: a count of its products is exact."""

    def __init__(self) -> None:
        super().__init__(PluginConfig(type="counted"))

    def attend(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKE: Tensor,
        cu_seqlens: Tensor,
        lengths: tuple[int, ...],
        scale: float,
    ) -> Tensor:
        import torch

        repeats = q_THD.shape[1] // k_TKD.shape[1]
        outputs = []
        start = 0
        for length in lengths:
            for token in range(start, start + length):
                keys_HLD = k_TKD[start : token + 1].repeat_interleave(repeats, 1).transpose(0, 1)
                values_HLE = v_TKE[start : token + 1].repeat_interleave(repeats, 1).transpose(0, 1)
                scores_H1L = torch.bmm(q_THD[token][:, None], keys_HLD.transpose(1, 2)) * scale
                outputs.append(torch.bmm(scores_H1L.softmax(-1), values_HLE)[:, 0])
            start += length
        return torch.stack(outputs)


class TokenwiseMoE(MoEBackend):
    """One token at a time. A batched product's last bits depend on how many tokens an expert got,
    hence on other documents; these do not."""

    def __init__(self) -> None:
        super().__init__(PluginConfig(type="tokenwise"))

    def experts(
        self,
        x_TH: Tensor,
        indices_Tk: Tensor,
        weights_Tk: Tensor,
        gate_up_EGH: Tensor,
        down_EHI: Tensor,
        activation: ExpertActivation = GATED_SILU,
    ) -> Tensor:
        import torch

        from prime_rl.layers.moe_torch import activate

        outputs = []
        for x_H, indices_k, weights_k in zip(x_TH, indices_Tk, weights_Tk, strict=True):
            total_H = torch.zeros_like(x_H)
            for expert, weight in zip(indices_k.tolist(), weights_k, strict=True):
                inner_I = activate(gate_up_EGH[expert] @ x_H, activation)
                total_H = total_H + weight * (down_EHI[expert] @ inner_I)
            outputs.append(total_H)
        return torch.stack(outputs)
