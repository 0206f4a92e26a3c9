"""Publishes weights: the handshake on rank 0, the payload by the configured transport."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from prime_rl.api import NamedTensor, WeightTransport
from prime_rl.control.broadcasts import BroadcastSender, HandshakeTimeout, version_directory
from prime_rl.errors import RunError
from prime_rl.parallel.collectives import barrier, gather_json
from prime_rl.parallel.world import World

log = logging.getLogger(__name__)


class Publisher:
    """Sends one version after the other; every rank calls every method."""

    def __init__(
        self,
        transport: WeightTransport,
        broadcasts: Path,
        timeout_s: float,
        world: World,
        weights: Callable[[int], Iterable[NamedTensor]],
    ) -> None:
        """`weights` of a version, all of them, are a collective."""
        self._sender = transport.sender(world.rank, world.size)
        self._handshake = BroadcastSender(broadcasts, timeout_s)
        self._broadcasts = broadcasts
        self._world = world
        self._weights = weights

    def publish(self, version: int) -> float:
        """Offer the version, wait until engines take it, send; returns the seconds it took.

        Raises RunError on every rank when the engines do not answer in time.
        """
        started = time.perf_counter()
        if self._world.is_master:
            self._handshake.offer(version)
        self._wait_ready(version)
        directory = version_directory(self._broadcasts, version)
        if self._world.is_master:
            self._handshake.start(version)
        barrier(self._world)
        self._sender.send(version, directory, self._weights(version))
        barrier(self._world)
        if self._world.is_master:
            self._handshake.finish(version)
        seconds = time.perf_counter() - started
        log.debug("published version %d in %.3f s", version, seconds)
        return seconds

    def _wait_ready(self, version: int) -> None:
        problem = ""
        if self._world.is_master:
            try:
                self._handshake.wait_ready(version)
            except HandshakeTimeout as error:
                problem = str(error)
        problem = gather_json(self._world, problem)[0]
        if problem:
            raise RunError(
                f"version {version} could not be published: {problem}. Are the orchestrator and "
                "the engines alive? weight_broadcast_timeout_s bounds this wait."
            )

    def close(self) -> None:
        """Release the transport."""
        self._sender.close()
