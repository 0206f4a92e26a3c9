"""Weights as safetensors files in a shared directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prime_rl.api import WeightTransport
from prime_rl_transport_filesystem.config import FilesystemConfig

if TYPE_CHECKING:
    from prime_rl.api import Receiver, Sender


class Filesystem(WeightTransport):
    """Works wherever trainer and engines see the same directory; needs no network of its own."""

    Config = FilesystemConfig
    capabilities = {"lora": False, "final_broadcast": True, "pauses_engines": True}

    def sender(self, rank: int, world_size: int) -> Sender:
        """As `WeightTransport.sender`; rank 0 writes."""
        from prime_rl_transport_filesystem.send import FilesystemSender

        return FilesystemSender(self.config, rank)

    def receiver(self, engine_index: int, engine_count: int) -> Receiver:
        """As `WeightTransport.receiver`."""
        from prime_rl_transport_filesystem.receive import FilesystemReceiver

        return FilesystemReceiver()
