"""Back ends without any batching: slow, and their arithmetic is that of the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_rl.api.backends import (
    GATED_SILU,
    AttentionBackend,
    DSABackend,
    ExpertActivation,
    MoEBackend,
)
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


class CountedDSA(DSABackend):
    """One query at a time against the rows it may score or read."""

    def __init__(self) -> None:
        super().__init__(PluginConfig(type="counted"))

    def select(
        self,
        q_TJD: Tensor,
        k_SD: Tensor,
        w_TJ: Tensor,
        first_T: Tensor,
        last_T: Tensor,
        top_k: int,
    ) -> Tensor:
        import torch

        chosen = q_TJD.new_full((q_TJD.shape[0], min(top_k, k_SD.shape[0])), -1, dtype=torch.int64)
        for token, (first, last) in enumerate(zip(first_T.tolist(), last_T.tolist(), strict=True)):
            if last <= first:
                continue
            dots_JS = q_TJD[token].detach() @ k_SD[first:last].detach().T
            scores_S = (w_TJ[token].detach()[:, None] * dots_JS.relu()).sum(0)
            best = scores_S.topk(min(top_k, last - first)).indices + first
            chosen[token, : best.shape[0]] = best
        return chosen

    def attend(
        self,
        q_THD: Tensor,
        k_SKD: Tensor,
        v_SKE: Tensor | None,
        rows_TN: Tensor,
        scale: float,
        sink_H: Tensor | None = None,
        value_size: int | None = None,
    ) -> Tensor:
        import torch

        values_SKE = k_SKD[..., :value_size] if v_SKE is None else v_SKE
        repeats = q_THD.shape[1] // k_SKD.shape[1]
        outputs = []
        for token in range(q_THD.shape[0]):
            rows = rows_TN[token][rows_TN[token] >= 0]
            keys_HND = k_SKD[rows].repeat_interleave(repeats, 1).transpose(0, 1)
            values_HNE = values_SKE[rows].repeat_interleave(repeats, 1).transpose(0, 1)
            scores_H1N = torch.bmm(q_THD[token][:, None], keys_HND.transpose(1, 2)) * scale
            if sink_H is not None:
                sink_H11 = sink_H[:, None, None].to(scores_H1N.dtype)
                scores_H1N = torch.cat((scores_H1N, sink_H11), dim=-1)
            weights_H1N = scores_H1N.softmax(-1)[..., : rows.shape[0]]
            outputs.append(torch.bmm(weights_H1N, values_HNE)[:, 0])
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
