"""The trainer's end: files into a temporary folder, the folder renamed, the manifest last."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import uuid4

import msgspec
import torch
from torch import Tensor

from prime_rl.api import NamedTensor, Sender
from prime_rl.errors import WeightTransferError
from prime_rl_transport_filesystem.config import FilesystemConfig
from prime_rl_transport_filesystem.manifest import (
    MANIFEST,
    PAYLOAD,
    FileEntry,
    Manifest,
    make_digest,
)

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class FilesystemSender(Sender):
    """Rank 0 writes; the other ranks only take part in gathering."""

    def __init__(self, config: FilesystemConfig, rank: int) -> None:
        self.config = config
        self.is_writer = rank == 0

    def send(self, version: int, directory: Path, tensors: Iterable[NamedTensor]) -> None:
        """As `Sender.send`. Raises WeightTransferError when the files cannot be written; the
        iterator is exhausted in any case, since the other ranks wait in it."""
        remaining = iter(tensors)
        try:
            if self.is_writer:
                self._write(version, directory, remaining)
        except OSError as error:
            raise WeightTransferError(
                f"version {version} cannot be written to {directory}: {error}"
            ) from error
        finally:
            for _ in remaining:
                pass

    def _write(self, version: int, directory: Path, tensors: Iterable[NamedTensor]) -> None:
        temporary = directory / f"{PAYLOAD}.tmp-{uuid4().hex[:8]}"
        temporary.mkdir()
        try:
            files: list[FileEntry] = []
            seen: set[str] = set()
            shard: list[NamedTensor] = []
            held = 0
            for item in tensors:
                if item.name in seen:
                    raise WeightTransferError(f"{item.name} was sent twice in version {version}")
                seen.add(item.name)
                shard.append(item)
                held += item.tensor.nbytes
                if held >= self.config.shard_mib * 2**20:
                    files.append(self._write_file(temporary, len(files), shard))
                    shard, held = [], 0
            if shard or not files:
                files.append(self._write_file(temporary, len(files), shard))
            self._sync(temporary)
            temporary.rename(directory / PAYLOAD)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        manifest = msgspec.json.encode(Manifest(version, self.config.checksum, files))
        partial = directory / f"{MANIFEST}.tmp"
        with partial.open("wb") as stream:
            stream.write(manifest)
            self._flush(stream.fileno())
        partial.rename(directory / MANIFEST)
        self._sync(directory)

    def _write_file(self, folder: Path, number: int, shard: list[NamedTensor]) -> FileEntry:
        """One safetensors file: length of the header, header, the tensors' bytes."""
        header: dict[str, object] = {}
        offset = 0
        # The format has no gaps, so wide elements first keep every tensor aligned.
        placed = sorted(shard, key=lambda item: -item.tensor.element_size())
        for name, tensor in placed:
            if tensor.dtype not in _DTYPES:
                raise WeightTransferError(f"{name} has dtype {tensor.dtype}, which cannot be sent")
            end = offset + tensor.nbytes
            header[name] = {
                "dtype": _DTYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [offset, end],
            }
            offset = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        digest = make_digest(self.config.checksum)
        path = folder / f"weights-{number + 1:05d}.safetensors"
        size = 0
        with path.open("wb") as stream:
            blocks: list[bytes | memoryview] = [len(text).to_bytes(8, "little"), text]
            for block in chain(blocks, (_bytes_of(item.tensor) for item in placed)):
                stream.write(block)
                digest.update(block)
                size += len(block)
            self._flush(stream.fileno())
        return FileEntry(path.name, size, digest.hexdigest(), [name for name, _ in shard])

    def _flush(self, descriptor: int) -> None:
        if self.config.sync_to_disk:
            os.fsync(descriptor)

    def _sync(self, folder: Path) -> None:
        """Make the folder's entries survive a power loss."""
        if not self.config.sync_to_disk:
            return
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat = tensor.detach().to("cpu").contiguous().reshape(-1)
    array: Any = flat.view(torch.uint8).numpy()
    return memoryview(array)
