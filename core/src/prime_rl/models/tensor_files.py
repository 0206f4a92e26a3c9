"""Reads safetensors checkpoints: headers first, then exactly the bytes that are asked for.

Files are read, not mapped: mapped pages count as this process's memory, and loading a large model
must stay within the size of its weights.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from prime_rl.api.layout import Region, Shape, whole
from prime_rl.api.transport import NamedTensor
from prime_rl.errors import WeightError

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LARGEST_HEADER_BYTES = 100_000_000


class TensorInfo(NamedTuple):
    """What is known of a checkpoint tensor before it is read."""

    shape: Shape
    dtype: torch.dtype


class WeightSource(Protocol):
    """Checkpoint tensors by name."""

    def names(self) -> Collection[str]:
        """Every name."""

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype."""

    def read(self, name: str, region: Region) -> Tensor:
        """A box of the tensor, on the CPU."""


class _Place(NamedTuple):
    path: Path
    info: TensorInfo
    offset: int
    """Byte in the file where the tensor starts."""


class TensorFiles:
    """The safetensors files of a checkpoint directory, or one such file."""

    def __init__(self, path: Path) -> None:
        """Raises WeightError when files are missing, cut short or disagree with the index."""
        self.path = path
        self._places: dict[str, _Place] = {}
        for file in _files(path):
            for name, place in _read_header(file).items():
                if name in self._places:
                    other = self._places[name].path.name
                    raise WeightError(f"{name} is in both {other} and {file.name} of {path}")
                self._places[name] = place
        self._check_index()

    def names(self) -> Collection[str]:
        """Every tensor name."""
        return self._places.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype."""
        return self._places[name].info

    def read(self, name: str, region: Region) -> Tensor:
        """A box of the tensor. Whole rows are one read; a box inside rows is cut from them."""
        place = self._places[name]
        shape, dtype = place.info
        if not shape:
            return self._read_bytes(place, 0, dtype.itemsize).view(dtype)[0].clone()
        start, stop = region[0]
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        flat = self._read_bytes(place, start * row_bytes, (stop - start) * row_bytes)
        rows = flat.view(dtype).view(stop - start, *shape[1:])
        inner = region[1:]
        if inner == whole(shape[1:]):
            return rows
        return rows[(slice(None), *(slice(low, high) for low, high in inner))].clone()

    def iterate(self) -> Iterator[NamedTensor]:
        """Every tensor, one at a time."""
        for name in self._places:
            yield NamedTensor(name, self.read(name, whole(self.info(name).shape)))

    def _read_bytes(self, place: _Place, offset: int, count: int) -> Tensor:
        data = torch.empty(count, dtype=torch.uint8)
        if count == 0:
            return data
        with open(place.path, "rb", buffering=0) as file:
            file.seek(place.offset + offset)
            view: Any = data.numpy()
            done = 0
            while done < count:
                read = file.readinto(view[done:])
                if not read:
                    raise WeightError(f"{place.path} ended while it was read")
                done += read
        return data

    def _check_index(self) -> None:
        """Everything the index promises must be there."""
        index = self.path / "model.safetensors.index.json"
        if not self.path.is_dir() or not index.is_file():
            return
        promised = _read_index(index)
        for name, file in promised.items():
            if name not in self._places or self._places[name].path.name != file:
                raise WeightError(f"{name} is listed for {file} by {index} but is not in that file")


def _files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = [path / name for name in sorted(set(_read_index(index).values()))]
        absent = [file.name for file in files if not file.is_file()]
        if absent:
            raise WeightError(
                f"{path}: file {absent[0]} is missing ({len(absent)} of {len(files)})"
            )
        return files
    if (path / "model.safetensors").is_file():
        return [path / "model.safetensors"]
    raise WeightError(
        f"{path} holds no weights: expected model.safetensors or model.safetensors.index.json"
    )


def _read_index(index: Path) -> dict[str, str]:
    try:
        promised = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = {str(name): str(file) for name, file in promised.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightError(f"{index} cannot be used: {type(error).__name__}: {error}") from error
    for file in files.values():
        if not re.fullmatch(r"[\w.\-]+", file):
            raise WeightError(f"{index}: {file!r} is no plain file name")
    return files


def _read_header(path: Path) -> dict[str, _Place]:
    size = os.path.getsize(path)
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LARGEST_HEADER_BYTES):
            raise WeightError(f"{path} is no safetensors file, or cut short ({size} bytes)")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        places = {
            name: _place(path, 8 + length, entry)
            for name, entry in header.items()
            if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightError(f"{path}: bad header: {type(error).__name__}: {error}") from error
    for name, place in places.items():
        end = place.offset + math.prod(place.info.shape) * place.info.dtype.itemsize
        if end > size:
            raise WeightError(f"{path} is cut short: {name} ends at byte {end} of {size}")
    return places


def _place(path: Path, base: int, entry: dict[str, Any]) -> _Place:
    shape = tuple(int(size) for size in entry["shape"])
    start, stop = entry["data_offsets"]
    dtype = _DTYPES[entry["dtype"]]
    if start < 0 or min(shape, default=0) < 0 or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"offsets {start}..{stop} do not fit shape {list(shape)} of {dtype}")
    return _Place(path, TensorInfo(shape, dtype), base + start)
