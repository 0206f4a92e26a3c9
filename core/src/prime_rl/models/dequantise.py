"""Turns block-quantised checkpoint tensors (FP8, packed FP4) into ordinary ones, box by box."""

from __future__ import annotations

import torch
from torch import Tensor

from prime_rl.api.layout import Region, Scale, Shape

FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
FP4_DTYPES = (torch.int8, torch.uint8)
"""Two FP4 numbers per byte: the even column in the low half."""

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def is_quantised(dtype: torch.dtype) -> bool:
    """A tensor of this dtype, where a layout allows a scale, needs one."""
    return dtype in FP8_DTYPES or dtype in FP4_DTYPES


def block_of(scale: Scale, dtype: torch.dtype) -> tuple[int, int] | None:
    """Rows and columns of one block of a tensor stored in `dtype`; None: it has no blocks."""
    return scale.fp4_block if dtype in FP4_DTYPES else scale.block


def stored_shape(shape: Shape, dtype: torch.dtype) -> Shape:
    """Shape of the stored tensor: packed FP4 has half the columns."""
    return (*shape[:-1], shape[-1] // 2) if dtype in FP4_DTYPES else shape


def scale_shape(shape: Shape, block: tuple[int, int]) -> Shape:
    """Shape of the scales; partial blocks at the edges have one, too."""
    return (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))


def stored_region(region: Region, dtype: torch.dtype) -> Region:
    """The stored box that covers a box of the unpacked tensor."""
    if dtype not in FP4_DTYPES:
        return region
    start, stop = region[-1]
    return (*region[:-1], (start // 2, -(-stop // 2)))


def scale_region(region: Region, block: tuple[int, int]) -> Region:
    """The scales that cover a box of the unpacked tensor."""
    (row, row_end), (column, column_end) = region[-2:]
    rows = (row // block[0], -(-row_end // block[0]))
    columns = (column // block[1], -(-column_end // block[1]))
    return (*region[:-2], rows, columns)


def dequantise(stored: Tensor, scales: Tensor, region: Region, block: tuple[int, int]) -> Tensor:
    """float32 [.., rows, columns] = q * scale of the box `region` (of the unpacked tensor).

    `stored` and `scales` are what `stored_region` and `scale_region` ask for. e8m0 scales are read
    by their meaning 2^(b-127); a byte tensor of scales is taken as e8m0.
    """
    (row, row_end), (column, column_end) = region[-2:]
    if stored.dtype in FP4_DTYPES:
        odd = column % 2
        values = unpack_fp4(stored)[..., odd : odd + column_end - column]
    else:
        values = stored.float()
    if scales.dtype in (torch.uint8, torch.int8):
        scales = scales.view(torch.float8_e8m0fnu)
    rows = torch.arange(row, row_end) // block[0] - row // block[0]
    columns = torch.arange(column, column_end) // block[1] - column // block[1]
    return values * scales.float()[..., rows, :][..., columns]


def unpack_fp4(packed: Tensor) -> Tensor:
    """float32 [.., 2K] of bytes [.., K]: low half first; bit 3 of a half is the sign."""
    table = torch.tensor((*_E2M1, *(-value for value in _E2M1)))
    raw = packed.view(torch.uint8)
    halves = torch.stack((raw & 15, raw >> 4), dim=-1).flatten(-2)
    return table[halves.long()]
