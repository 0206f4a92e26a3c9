"""Batches as files: `rollouts/step_<n>/rank_<r>.bin`, written beside and renamed."""

from __future__ import annotations

import asyncio
import shutil
import time
from pathlib import Path

from prime_rl.batches.base import (
    STEPS_KEPT,
    BatchClient,
    BatchClosed,
    BatchServer,
    BatchTimeout,
    read_address,
    write_address,
)
from prime_rl.configs.paths import StagePaths, step_directories
from prime_rl.wire import RankBatch, decode_micro_batches, encode_micro_batches

CLOSED_NAME = "closed"
POLL_S = 0.02


def rank_file(rollouts: Path, step: int, data_rank: int) -> Path:
    """The batch of one rank."""
    return rollouts / f"step_{step}" / f"rank_{data_rank}.bin"


def received_mark(rollouts: Path, step: int, data_rank: int) -> Path:
    """Exists once the rank has read its batch."""
    return rank_file(rollouts, step, data_rank).with_suffix(".received")


class FilesystemBatchServer(BatchServer):
    """Empties the folder, then offers batches in it; the two newest received steps stay."""

    def __init__(self, paths: StagePaths, data_ranks: int) -> None:
        super().__init__(data_ranks)
        self._rollouts = paths.rollouts
        self._is_closed = False
        shutil.rmtree(self._rollouts, ignore_errors=True)
        self._rollouts.mkdir(parents=True)
        write_address(paths.batch_address, str(self._rollouts))

    async def send(self, step: int, ranks: list[RankBatch]) -> None:
        """See BatchServer.send."""
        self._check(ranks)
        while len(self._not_received()) >= STEPS_KEPT:
            await asyncio.sleep(POLL_S)
        for number, directory in step_directories(self._rollouts):
            if number < step - STEPS_KEPT:
                shutil.rmtree(directory)
        for data_rank, batch in enumerate(ranks):
            path = rank_file(self._rollouts, step, data_rank)
            path.parent.mkdir(exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(encode_micro_batches(batch))
            temporary.replace(path)

    def _not_received(self) -> list[int]:
        return [
            step
            for step, _ in step_directories(self._rollouts)
            if not all(
                received_mark(self._rollouts, step, rank).exists()
                for rank in range(self.data_ranks)
            )
        ]

    def close(self, reason: str = "") -> None:
        """See BatchServer.close. The reason stays for ranks that ask later."""
        if not self._is_closed:
            self._is_closed = True
            text = reason or "the orchestrator has ended"
            write_address(self._rollouts / CLOSED_NAME, text)


class FilesystemBatchClient(BatchClient):
    """Waits for its file; batches that are there are served even after the server closed."""

    def __init__(self, paths: StagePaths, data_rank: int) -> None:
        self._address_file = paths.batch_address
        self._data_rank = data_rank

    def receive(self, step: int, timeout_s: float) -> RankBatch:
        """See BatchClient.receive."""
        deadline = time.monotonic() + timeout_s
        rollouts = Path(read_address(self._address_file, deadline))
        path = rank_file(rollouts, step, self._data_rank)
        closed = rollouts / CLOSED_NAME
        while True:
            ends_here = closed.exists()
            if path.exists():
                batch = decode_micro_batches(path.read_bytes())
                received_mark(rollouts, step, self._data_rank).touch()
                return batch
            if ends_here:
                raise BatchClosed(closed.read_text().strip())
            if time.monotonic() > deadline:
                raise BatchTimeout(f"waited {timeout_s:g} s for the batch of step {step} ({path})")
            time.sleep(POLL_S)

    def close(self) -> None:
        """Nothing is held open."""
