"""The two ends of the batch transport and the ways it ends."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

from prime_rl.errors import RunError
from prime_rl.wire import RankBatch

STEPS_KEPT = 2
"""Steps that may wait for the trainer; one more blocks the sender."""


class BatchTimeout(TimeoutError):
    """The batch of a step did not arrive in time."""


class BatchClosed(RunError):
    """The orchestrator sends no more batches; the text is its reason."""


class BatchServer(ABC):
    """The orchestrator's end. Offers the batches of at most `STEPS_KEPT` steps."""

    def __init__(self, data_ranks: int) -> None:
        self.data_ranks = data_ranks

    @abstractmethod
    async def send(self, step: int, ranks: list[RankBatch]) -> None:
        """Offer the batch of `step`, one entry per data rank. Returns when it can be pulled; waits
        while two steps are on offer that some rank has not moved past."""

    @abstractmethod
    def close(self, reason: str = "") -> None:
        """Tell the ranks that no further batch comes, and why; then release everything.

        With a reason (the run failed), waits a moment so that ranks that are pulling hear it; what
        they are waiting for now is answered in any case. Idempotent.
        """

    def _check(self, ranks: list[RankBatch]) -> None:
        if len(ranks) != self.data_ranks:
            raise ValueError(f"expected {self.data_ranks} rank batches, found {len(ranks)}")


class BatchClient(ABC):
    """A trainer rank's end."""

    @abstractmethod
    def receive(self, step: int, timeout_s: float) -> RankBatch:
        """This rank's micro-batches of `step`. May be called again for the same step.

        Raises BatchTimeout after `timeout_s` seconds, BatchClosed with the orchestrator's reason.
        """

    @abstractmethod
    def close(self) -> None:
        """Release the connection. Idempotent."""


def read_address(path: Path, deadline: float) -> str:
    """The text of an address file, waiting for it until `deadline` (time.monotonic)."""
    while True:
        if path.exists() and (text := path.read_text().strip()):
            return text
        if time.monotonic() > deadline:
            raise BatchTimeout(f"the orchestrator did not offer batches in time ({path})")
        time.sleep(0.02)


def write_address(path: Path, address: str) -> None:
    """Publish an address: readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(address + "\n")
    temporary.replace(path)
