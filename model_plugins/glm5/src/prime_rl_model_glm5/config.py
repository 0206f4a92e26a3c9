"""The plugin's options."""

from __future__ import annotations

from typing import Literal

from prime_rl.configs.base import PluginConfig

Precision = Literal["full", "fp8"]


class Glm5Config(PluginConfig):
    """Which roundings of an FP8 server the model repeats; all are off by default.

    Forward values are rounded as the server rounds them, gradients pass the rounding. Trainer and
    embedded engine compute the same module, so a switch holds on both sides.
    """

    type: Literal["glm5"] = "glm5"
    kv_precision: Precision = "full"
    """fp8: latents are read as from a cache of 512 e4m3 numbers with a scale per 128 and a bfloat16
    rotary part, vLLM's `--kv-cache-dtype fp8` with FlashMLA (`fp8_ds_mla`)."""
    indexer_precision: Precision = "full"
    """fp8: keys are selected by the e4m3 queries and keys that vLLM's fused kernel scores."""
    linear_precision: Precision = "full"
    """fp8: projections, MLPs and experts multiply e4m3 weights in blocks of 128 x 128 and e4m3
    inputs in groups of 128, vLLM's `--quantization fp8_per_block`."""
    weight_scales: Literal["exact", "power_of_two", "two_step"] = "exact"
    """Scales of FP8 weights. exact: vLLM with VLLM_USE_DEEP_GEMM_E8M0=0. two_step: vLLM's default
    where it uses DeepGEMM, which rounds twice. power_of_two: one rounding to power-of-two scales,
    for weights of a dequantised release that has such scales. Inputs have exact scales with
    "exact", else powers of two."""
