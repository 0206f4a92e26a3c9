"""Throughput and model FLOP utilisation from the model's own FLOP count."""

from __future__ import annotations

import time

import torch

PEAK_BF16_FLOPS = (
    ("GB200", 2.5e15),
    ("GB300", 2.5e15),
    ("B200", 2.25e15),
    ("B300", 2.25e15),
    ("H100 NVL", 835e12),
    ("H100 PCIe", 756e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("A100", 312e12),
    ("MI300X", 1307.4e12),
    ("MI325X", 1307.4e12),
)
"""Part of a device's name -> dense bf16 FLOP/s its maker states; the first match counts."""

TRAINING_FACTOR = 3.0
"""Forward and backward cost three forwards; recomputed activations are not counted."""


def peak_flops(device: torch.device) -> float | None:
    """FLOP/s one rank could reach at most: the maker's figure, on a CPU a measured matrix product;
    None for an accelerator that is not in the table."""
    if device.type == "cpu":
        return _measured_flops()
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_BF16_FLOPS if part in name), None)


def _measured_flops(size: int = 512, repeats: int = 5) -> float:
    """Best of a few float32 products of square matrices, with the threads this rank has."""
    matrix = torch.ones(size, size)
    best_s = float("inf")
    for _ in range(repeats):
        started = time.perf_counter()
        torch.mm(matrix, matrix)
        best_s = min(best_s, time.perf_counter() - started)
    return 2.0 * size**3 / best_s


def speed_metrics(
    tokens: float, training_flops: float, seconds: float, ranks: int, peak: float | None
) -> dict[str, float]:
    """Tokens and FLOPs are those of all ranks; utilisation in percent."""
    metrics = {
        "perf/throughput": tokens / seconds,
        "perf/throughput_per_gpu": tokens / seconds / ranks,
    }
    if peak is not None:
        metrics["perf/mfu"] = 100.0 * training_flops / seconds / (peak * ranks)
    return metrics
