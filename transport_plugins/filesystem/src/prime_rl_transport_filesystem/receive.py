"""The engine's end: believes the manifest only, checks everything, then yields mapped tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open

from prime_rl.api import NamedTensor, Receiver
from prime_rl.errors import WeightTransferError
from prime_rl_transport_filesystem.manifest import PAYLOAD, read_manifest, verify


class FilesystemReceiver(Receiver):
    """Reads versions in any order; keeps nothing between them."""

    def receive(self, version: int, directory: Path) -> Iterator[NamedTensor]:
        """As `Receiver.receive`: every file is verified before the first tensor is yielded.

        Tensors are views of mapped files, in the order they were sent; copy what must outlive the
        iteration.
        """
        manifest = read_manifest(directory, version)
        payload = directory / PAYLOAD
        verify(manifest, payload)
        for file in manifest.files:
            path = payload / file.name
            try:
                with safe_open(path, framework="pt", device="cpu") as tensors:
                    found = set(tensors.keys())
                    if found != set(file.tensors) or len(found) != len(file.tensors):
                        differing = sorted(found.symmetric_difference(file.tensors))
                        raise WeightTransferError(
                            f"{path} and the manifest differ in tensors {differing[:3]}"
                        )
                    for name in file.tensors:
                        yield NamedTensor(name, tensors.get_tensor(name))
            except (SafetensorError, OSError) as error:
                raise WeightTransferError(f"{path} cannot be read: {error}") from error
