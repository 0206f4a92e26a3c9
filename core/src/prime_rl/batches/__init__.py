"""Carries each step's micro-batches from the orchestrator to the trainer ranks, which pull them."""

from prime_rl.batches.base import BatchClient, BatchClosed, BatchServer, BatchTimeout
from prime_rl.batches.opening import open_batch_client, open_batch_server

__all__ = [
    "BatchClient",
    "BatchClosed",
    "BatchServer",
    "BatchTimeout",
    "open_batch_client",
    "open_batch_server",
]
