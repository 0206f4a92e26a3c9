"""Tensors that a model does not use and an export must carry: draft layers, a vision tower."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from prime_rl.api.layout import Scale, WeightLayout, whole
from prime_rl.api.transport import NamedTensor
from prime_rl.models import dequantise
from prime_rl.models.tensor_files import TensorFiles

SCALE_ENDINGS = ("_scale_inv", "_scale")
"""What checkpoints put behind a quantised tensor's name for that of its scales."""
SCALE_INSTEAD_OF_WEIGHT = ".scale"
"""... or in place of `.weight`."""


def kept_tensors(
    layout: WeightLayout, source: TensorFiles, dtype: torch.dtype = torch.bfloat16
) -> Iterator[NamedTensor]:
    """The kept tensors of a checkpoint, one at a time. Those quantised in blocks become `dtype`:
    an export is written unquantised, and says so in its config.json."""
    names = [name for name in source.names() if layout.is_kept(name)]
    scales = {name: scale_of(name, names) for name in names}
    used = set(scales.values())
    for name in names:
        scale = scales[name]
        if name in used:
            continue
        stored = source.read(name, whole(source.info(name).shape))
        if scale is not None and dequantise.is_quantised(stored.dtype):
            numbers = source.read(scale, whole(source.info(scale).shape))
            stored = _plain(stored, numbers).to(dtype)
        yield NamedTensor(name, stored)


def scale_of(name: str, names: Collection[str]) -> str | None:
    """The tensor among `names` that holds the scales of `name`."""
    candidates = [name + ending for ending in SCALE_ENDINGS]
    if name.endswith(".weight"):
        candidates.append(name.removesuffix(".weight") + SCALE_INSTEAD_OF_WEIGHT)
    return next((candidate for candidate in candidates if candidate in names), None)


def _plain(stored: Tensor, scales: Tensor) -> Tensor:
    """float32 numbers of a tensor quantised in blocks of the usual sizes, or with one scale."""
    if scales.numel() == 1 and stored.dtype in dequantise.FP8_DTYPES:
        return stored.float() * scales.float()
    block = dequantise.block_of(Scale(""), stored.dtype)
    assert block is not None
    columns = stored.shape[-1] * (2 if stored.dtype in dequantise.FP4_DTYPES else 1)
    region = whole((*stored.shape[:-1], columns))
    return dequantise.dequantise(stored, scales, region, block)
