"""The roundings of an FP8 server in this model. T rows, C latent width, J index heads, D their size."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from prime_rl.layers.float8 import (
    Float8,
    dequantise_groups,
    quantise_groups,
    round_groups,
)
from prime_rl.layers.float8_weights import WeightScales
from prime_rl_model_glm5.config import Glm5Config

LATENT_GROUP = 128
"""Numbers of a cached latent that share a scale."""
LATENT_SCALE_FLOOR = 1e-4
INDEX_AMAX_FLOOR = 1e-4


@dataclass(frozen=True)
class Numerics:
    """What is rounded."""

    fp8_cache: bool = False
    fp8_indexer: bool = False
    linear_scales: WeightScales | None = None
    """Scales of the weights of 8-bit layers; None: layers are not 8-bit."""


def read_numerics(config: Glm5Config) -> Numerics:
    """What the options ask for."""
    return Numerics(
        fp8_cache=config.kv_precision == "fp8",
        fp8_indexer=config.indexer_precision == "fp8",
        linear_scales=config.weight_scales if config.linear_precision == "fp8" else None,
    )


def quantise_latents(latent_TC: Tensor) -> Float8:
    """Codes and scales that the cache keeps of normalised latents, float32 before any rounding."""
    return quantise_groups(
        latent_TC, LATENT_GROUP, power_of_two=True, scale_floor=LATENT_SCALE_FLOOR
    )


def round_latents(latent_TC: Tensor) -> Tensor:
    """What attention reads of them; straight-through."""
    return round_groups(latent_TC, LATENT_GROUP, power_of_two=True, scale_floor=LATENT_SCALE_FLOOR)


def quantise_heads(x: Tensor) -> Float8:
    """Index queries [T, J, D] or keys [T, D], float32: one scale for each head."""
    return quantise_groups(x, x.shape[-1], power_of_two=True, amax_floor=INDEX_AMAX_FLOOR)


def quantise_index(
    query_TJD: Tensor, key_TD: Tensor, weights_TJ: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and head weights, float32, with which the scores are those of the server:

    score = k_scale * sum_j w_j * (q_scale_j * D^-1/2 * J^-1/2) * relu(q8_j . k8).
    """
    query, key = quantise_heads(query_TJD), quantise_heads(key_TD)
    heads, size = query_TJD.shape[1:]
    scaled_TJ = weights_TJ * query.scales[..., 0] * size**-0.5 * heads**-0.5
    return query.codes.float(), dequantise_groups(key, size), scaled_TJ
