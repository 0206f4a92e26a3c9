"""Core's DSA back end `torch`: index scores, top-k and sparse attention in plain torch.

T queries, S key rows, J index heads, H query heads, K key heads, G = H / K, N rows per query,
D key size, E value size. Queries are taken in chunks, so that no T x S or T x N x D tensor exists.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from prime_rl.api.backends import DSABackend
from prime_rl.api.plugin import Capabilities
from prime_rl.configs.base import PluginConfig

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Largest intermediate of a chunk of queries."""


class TorchDSAConfig(PluginConfig):
    """Nothing to set."""

    type: Literal["torch"] = "torch"


class TorchDSA(DSABackend):
    """The reference: any device torch has, any sizes."""

    Config = TorchDSAConfig
    capabilities: ClassVar[Capabilities] = {
        "devices": ("cpu", "cuda"),
        "dtypes": ("float32", "bfloat16", "float16"),
    }

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

        import prime_rl.layers.dsa_torch_select  # noqa: F401, registers the operator

        operator = torch.ops.prime_rl.dsa_select_torch
        inputs = (q_TJD.detach(), k_SD.detach(), w_TJ.detach(), first_T, last_T)
        rows_TN: Tensor = operator(*inputs, top_k)
        return rows_TN

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
        from prime_rl.layers.dsa_torch_attend import SparseAttention

        if (v_SKE is None) == (value_size is None):
            raise ValueError("give the values, or how many numbers of a key row are its value")
        result: Tensor = SparseAttention.apply(
            q_THD, k_SKD, v_SKE, rows_TN, scale, sink_H, value_size
        )
        return result
