"""The roundings of an FP8 server in this model.

S key rows, T tokens, C entries, D head size, J index heads, I their size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prime_rl.layers.float8 import (
    Float8,
    dequantise_groups,
    quantise_groups,
    round_bfloat16,
    round_groups,
)
from prime_rl.layers.float8_weights import WeightScales
from prime_rl_model_deepseek_v4.config import DeepseekV4Config

ROW_GROUP = 64
"""Numbers of a cached row that share a scale."""
AMAX_FLOOR = 1e-4
"""The largest magnitude of a group, or of an index head, counts as at least this."""


@dataclass(frozen=True)
class Numerics:
    """What is rounded."""

    fp8_cache: bool = False
    fp8_indexer: bool = False
    linear_scales: WeightScales | None = None
    """Scales of the weights of 8-bit layers; None: layers are not 8-bit."""
    grouped_scales: WeightScales | None = None
    """The same for the grouped output projection."""


PLAIN = Numerics()
"""Nothing is rounded."""


def read_numerics(config: DeepseekV4Config) -> Numerics:
    """What the options ask for."""
    scales = config.weight_scales
    return Numerics(
        fp8_cache=config.kv_precision == "fp8",
        fp8_indexer=config.indexer_precision == "fp8",
        linear_scales=scales if config.linear_precision == "fp8" else None,
        grouped_scales=scales if config.grouped_output_precision == "fp8" else None,
    )


def quantise_plain(plain_SP: Tensor) -> Float8:
    """Codes and scales that the cache keeps of the unrotated numbers of rows, which it takes from
    bfloat16."""
    return quantise_groups(plain_SP.bfloat16(), ROW_GROUP, power_of_two=True, amax_floor=AMAX_FLOOR)


def round_rows(rows_SD: Tensor, rotary_dim: int) -> Tensor:
    """What attention reads of normalised and rotated rows: rotated numbers, the last ones, are
    bfloat16. Straight-through, in the rows' dtype, which holds it exactly."""
    still = rows_SD.shape[-1] - rotary_dim
    plain = round_groups(
        round_bfloat16(rows_SD[:, :still]), ROW_GROUP, power_of_two=True, amax_floor=AMAX_FLOOR
    )
    return torch.cat((plain, round_bfloat16(rows_SD[:, still:])), dim=-1)


def quantise_heads(x: Tensor) -> Float8:
    """Rotated index queries [T, J, I] or keys [C, I], by way of bfloat16: one scale per head."""
    return quantise_groups(x.bfloat16(), x.shape[-1], power_of_two=True, amax_floor=AMAX_FLOOR)


def quantise_index(
    query_TJI: Tensor, key_CI: Tensor, weights_TJ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and head weights, float32, with which the scores are those of the server:

    score = k_scale * sum_j (w_j * q_scale_j * I^-1/2 * J^-1/2) * relu(q8_j . k8).
    """
    query, key = quantise_heads(query_TJI), quantise_heads(key_CI)
    heads, size = query_TJI.shape[1:]
    scaled_TJ = weights_TJ.float() * query.scales[..., 0] * size**-0.5 * heads**-0.5
    return query.codes.float(), dequantise_groups(key, size), scaled_TJ
