"""The engine's side of a weight update: takes a published version through the weight transport."""

from __future__ import annotations

import itertools
import logging
import time
from pathlib import Path

import torch

from prime_rl.api.transport import Receiver
from prime_rl.inference.engine_loop import EngineLoop
from prime_rl.inference.protocol import RequestError

logger = logging.getLogger(__name__)


class WeightUpdater:
    """Knows the version that is served. One update at a time, between two model steps."""

    def __init__(self, loop: EngineLoop, receiver: Receiver | None, version: int = 0) -> None:
        self.loop = loop
        self.receiver = receiver
        self.version = version
        self.damage: str | None = None
        """Why the weights are neither old nor new; None when they are whole."""

    def apply(self, version: int, directory: Path) -> None:
        """Take the version's tensors. Runs in the engine thread.

        Running sequences continue with the new weights: their tokens are appended to the emptied
        cache. After a failure half-way the engine refuses to generate until an update succeeds.
        """
        if self.receiver is None:
            raise RequestError(400, "this engine was started without a weight transport")
        started = time.perf_counter()
        tensors = self.receiver.receive(version, directory)
        first = next(tensors, None)  # a payload known to be damaged raises here, weights untouched
        if first is None:
            raise RequestError(400, f"version {version} in {directory} holds no tensors")
        try:
            with torch.inference_mode(False), torch.no_grad():
                self.loop.runner.update(itertools.chain([first], tensors))
        except BaseException:
            # Only now: requests that arrive during the update wait for it like any others.
            self.damage = f"the update to version {version} did not complete"
            raise
        finally:
            self.loop.restart_caches()
        self.damage = None
        self.version = version
        logger.info(
            "weights of version %d taken in %.3f s, %d sequences go on",
            version,
            time.perf_counter() - started,
            self.loop.running_count,
        )
