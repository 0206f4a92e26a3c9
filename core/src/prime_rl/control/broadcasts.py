"""The weight-update handshake: four marker files per version, the same for every transport.

Order, seen from outside: offered (.sender_ready) -> engines paused -> .receiver_ready -> .started
-> payload -> .finished -> engines updated and resumed. Sender and receiver each wait for the
other at most `timeout_s`.
"""

from __future__ import annotations

import logging
import shutil
import time
from pathlib import Path

from prime_rl.configs.paths import step_directories

SENDER_READY = ".sender_ready"
RECEIVER_READY = ".receiver_ready"
STARTED = ".started"
FINISHED = ".finished"
POLL_S = 0.01
WARN_S = 60.0
"""A wait is reported this often."""

logger = logging.getLogger(__name__)


class HandshakeTimeout(TimeoutError):
    """The other side of a weight update did not answer in time."""


def version_directory(broadcasts: Path, version: int) -> Path:
    """Folder of a version's markers and payload."""
    return broadcasts / f"step_{version}"


def prune_beyond(broadcasts: Path, version: int) -> None:
    """Remove versions above `version`: leftovers of a future that a resume abandoned."""
    for number, directory in step_directories(broadcasts):
        if number > version:
            shutil.rmtree(directory)


def _mark(path: Path) -> None:
    temporary = path.with_name(path.name + ".tmp")
    temporary.touch()
    temporary.rename(path)


def _wait(path: Path, timeout_s: float, meaning: str) -> None:
    started = time.monotonic()
    warned = started
    while not path.exists():
        now = time.monotonic()
        if now - started > timeout_s:
            raise HandshakeTimeout(f"waited {timeout_s:g} s for {meaning} ({path})")
        if now - warned > WARN_S:
            warned = now
            logger.warning("waiting for %s since %.0f s", meaning, now - started)
        time.sleep(POLL_S)


class BroadcastSender:
    """The trainer master's side. Calls in order: offer, wait_ready, start, <send>, finish."""

    def __init__(self, broadcasts: Path, timeout_s: float) -> None:
        self.broadcasts = broadcasts
        self.timeout_s = timeout_s

    def offer(self, version: int) -> Path:
        """Empty the version's folder, say that it is coming, and return the folder."""
        directory = version_directory(self.broadcasts, version)
        if directory.exists():
            shutil.rmtree(directory)
        directory.mkdir(parents=True)
        _mark(directory / SENDER_READY)
        return directory

    def wait_ready(self, version: int) -> None:
        """Wait until the receiver is ready; raises HandshakeTimeout."""
        directory = version_directory(self.broadcasts, version)
        _wait(directory / RECEIVER_READY, self.timeout_s, f"engines to take version {version}")

    def start(self, version: int) -> None:
        """The payload begins."""
        _mark(version_directory(self.broadcasts, version) / STARTED)

    def finish(self, version: int) -> None:
        """The payload is complete: the version is published. Versions below `version - 1` go."""
        _mark(version_directory(self.broadcasts, version) / FINISHED)
        for number, directory in step_directories(self.broadcasts):
            if number < version - 1:
                shutil.rmtree(directory, ignore_errors=True)


class BroadcastReceiver:
    """The orchestrator's side. Calls in order: newest_offer, acknowledge, is_finished/wait."""

    def __init__(self, broadcasts: Path, timeout_s: float) -> None:
        self.broadcasts = broadcasts
        self.timeout_s = timeout_s

    def newest_offer(self, after: int) -> int | None:
        """Newest version above `after` that is offered; older offers are skipped."""
        offers = [
            number
            for number, directory in step_directories(self.broadcasts)
            if number > after and (directory / SENDER_READY).exists()
        ]
        return offers[-1] if offers else None

    def acknowledge(self, version: int) -> Path:
        """Engines are ready; returns the version's folder."""
        directory = version_directory(self.broadcasts, version)
        _mark(directory / RECEIVER_READY)
        return directory

    def is_finished(self, version: int) -> bool:
        """True once the payload is complete."""
        return (version_directory(self.broadcasts, version) / FINISHED).exists()

    def wait_finished(self, version: int) -> None:
        """Wait for the payload; raises HandshakeTimeout."""
        directory = version_directory(self.broadcasts, version)
        _wait(directory / FINISHED, self.timeout_s, f"the payload of version {version}")
