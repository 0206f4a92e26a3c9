"""The manifest: what a version consists of. A version without one, or that differs from it, is void.

Lies beside the folder of files as `manifest.json`; written last, by temporary file and rename.
"""

from __future__ import annotations

import hashlib
import zlib
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from prime_rl.errors import WeightTransferError

MANIFEST = "manifest.json"
PAYLOAD = "weights"
"""Folder of the files."""
READ_BYTES = 4 * 2**20

Algorithm = Literal["crc32", "sha256"]


class FileEntry(msgspec.Struct, forbid_unknown_fields=True):
    """One safetensors file."""

    name: str
    size: int
    digest: str
    tensors: list[str]
    """Names in the order they were sent: layer by layer."""


class Manifest(msgspec.Struct, forbid_unknown_fields=True):
    """One version."""

    version: int
    checksum: Algorithm
    files: list[FileEntry]
    format: int = 1


class Digest(Protocol):
    """Accumulates the checksum of a file."""

    def update(self, data: bytes | memoryview) -> None:
        """Add bytes."""

    def hexdigest(self) -> str:
        """The checksum so far."""


class _CRC32:
    def __init__(self) -> None:
        self._value = 0

    def update(self, data: bytes | memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


def make_digest(algorithm: Algorithm) -> Digest:
    """An empty checksum."""
    return _CRC32() if algorithm == "crc32" else hashlib.sha256()


def read_manifest(directory: Path, version: int) -> Manifest:
    """The manifest of a version's directory. Raises WeightTransferError."""
    path = directory / MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise WeightTransferError(
            f"{path} does not exist: version {version} was not completed, or the engine does not "
            "see the trainer's directory"
        ) from None
    except (OSError, msgspec.MsgspecError) as error:
        raise WeightTransferError(f"{path} cannot be used: {error}") from error
    if manifest.format != 1:
        raise WeightTransferError(f"{path} has format {manifest.format}, this engine reads 1")
    if manifest.version != version:
        raise WeightTransferError(f"{path} is of version {manifest.version}, expected {version}")
    for file in manifest.files:
        if Path(file.name).name != file.name or file.name in ("", ".", ".."):
            raise WeightTransferError(f"{path}: {file.name!r} is no plain file name")
    return manifest


def verify(manifest: Manifest, payload: Path) -> None:
    """Read every file and compare size and checksum. Raises WeightTransferError naming the first
    file that differs."""
    for file in manifest.files:
        path = payload / file.name
        digest = make_digest(manifest.checksum)
        size = 0
        try:
            with path.open("rb") as stream:
                while block := stream.read(READ_BYTES):
                    digest.update(block)
                    size += len(block)
        except OSError as error:
            raise WeightTransferError(
                f"{path} of version {manifest.version} cannot be read: {error.strerror}"
            ) from error
        if size != file.size:
            raise WeightTransferError(f"{path} has {size} bytes, the manifest says {file.size}")
        if digest.hexdigest() != file.digest:
            raise WeightTransferError(
                f"{path} is damaged: {manifest.checksum} {digest.hexdigest()}, the manifest says "
                f"{file.digest}"
            )
