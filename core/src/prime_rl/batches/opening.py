"""Opens either end of the configured batch transport."""

from __future__ import annotations

from typing import Literal

from prime_rl.batches.base import BatchClient, BatchServer
from prime_rl.configs.paths import StagePaths

BatchKind = Literal["zmq", "filesystem"]


def open_batch_server(kind: BatchKind, paths: StagePaths, data_ranks: int) -> BatchServer:
    """The orchestrator's end; publishes its address in `paths.batch_address`."""
    if kind == "zmq":
        from prime_rl.batches.zmq import ZmqBatchServer

        return ZmqBatchServer(paths, data_ranks)
    from prime_rl.batches.filesystem import FilesystemBatchServer

    return FilesystemBatchServer(paths, data_ranks)


def open_batch_client(kind: BatchKind, paths: StagePaths, data_rank: int) -> BatchClient:
    """The end of data rank `data_rank`; waits for the server when a batch is first asked for."""
    if kind == "zmq":
        from prime_rl.batches.zmq import ZmqBatchClient

        return ZmqBatchClient(paths, data_rank)
    from prime_rl.batches.filesystem import FilesystemBatchClient

    return FilesystemBatchClient(paths, data_rank)
