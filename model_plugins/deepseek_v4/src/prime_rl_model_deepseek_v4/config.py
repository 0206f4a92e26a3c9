"""The plugin's options."""

from __future__ import annotations

from typing import Literal

from prime_rl.configs.base import PluginConfig

Precision = Literal["full", "fp8"]


class DeepseekV4Config(PluginConfig):
    """Which roundings of an FP8 server the model repeats; all are off by default.

    Forward values are rounded as the server rounds them, gradients pass the rounding. Trainer and
    embedded engine compute the same module, so a switch holds on both sides.
    """

    former = {"dsv4_kv_precision": "write `.kv_precision` instead"}

    type: Literal["deepseek_v4"] = "deepseek_v4"
    kv_precision: Precision = "full"
    """fp8: local keys and compressed entries are read as from vLLM's `fp8_ds_mla` cache, 448 e4m3
    numbers with a power-of-two scale per 64 and a bfloat16 rotary part. It is the only layout of
    vLLM's FlashMLA for this model, whatever `--kv-cache-dtype` says."""
    indexer_precision: Precision = "full"
    """fp8: entries are chosen by the e4m3 queries and keys of vLLM's indexer cache."""
    linear_precision: Precision = "full"
    """fp8: projections and experts multiply e4m3 weights in blocks of 128 x 128 and e4m3 inputs in
    groups of 128, vLLM's `--quantization fp8_per_block`."""
    grouped_output_precision: Precision = "full"
    """The same for the grouped output projection (`wo_a`), whose inputs always have power-of-two
    scales. vLLM quantises it with the others; full: it is kept in bfloat16."""
    weight_scales: Literal["exact", "power_of_two", "two_step"] = "power_of_two"
    """Scales of FP8 weights. power_of_two: one rounding to power-of-two scales, which gives back
    the weights of a dequantised release exactly. exact: vLLM with VLLM_USE_DEEP_GEMM_E8M0=0.
    two_step: vLLM's default where it uses DeepGEMM, which rounds twice. Inputs have exact scales
    with "exact", else powers of two."""
