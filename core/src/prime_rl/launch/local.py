"""The local launcher: starts a stage's processes here and ends them all when one fails."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from prime_rl.api import Launcher, PluginConfig, Process
from prime_rl.control.lifetime import PARENT_VARIABLE

logger = logging.getLogger(__name__)

POLL_S = 0.1
LOG_TAIL_LINES = 15


class LocalLauncherConfig(PluginConfig):
    """Processes on this machine."""

    type: Literal["local"] = "local"
    grace_s: float = Field(10.0, gt=0)
    """Seconds processes get to end by themselves before they are killed."""


@dataclass
class _Running:
    process: Process
    handle: subprocess.Popen[bytes]


class LocalLauncher(Launcher):
    """Starts and watches processes of this machine.

    Each process leads its own process group, so that Ctrl-C reaches only the launcher, which then
    ends the groups in an order of its choosing.
    """

    Config = LocalLauncherConfig
    capabilities = {"nodes": 1}

    def run(self, processes: Sequence[Process], observe: Callable[[], None] | None = None) -> int:
        """See the contract. SIGINT and SIGTERM end everything and give 128 + the signal."""
        running: list[_Running] = []
        with _deferred_signals() as received:
            try:
                for process in processes:
                    running.append(_Running(process, _start(process)))
                return self._watch(running, received, observe)
            finally:
                self._end_all(running)

    def _watch(
        self,
        running: list[_Running],
        received: list[int],
        observe: Callable[[], None] | None,
    ) -> int:
        while True:
            if received:
                logger.warning("received %s, ending", signal.Signals(received[0]).name)
                return 128 + received[0]
            failed = _first_failure(running)
            if failed is not None:
                return failed
            enders = [entry for entry in running if entry.process.ends_run]
            if all(entry.handle.poll() == 0 for entry in enders):
                return 0
            if observe is not None:
                observe()
            time.sleep(POLL_S)

    def _end_all(self, running: list[_Running]) -> None:
        for entry in running:
            _signal_group(entry.handle, signal.SIGTERM)
        deadline = time.monotonic() + self.config.grace_s
        for entry in running:
            try:
                entry.handle.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                logger.warning(
                    "%s did not end within %g s, killing it",
                    entry.process.name,
                    self.config.grace_s,
                )
        for entry in running:
            _signal_group(entry.handle, signal.SIGKILL)
            entry.handle.wait()


def _start(process: Process) -> subprocess.Popen[bytes]:
    process.log.parent.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, **process.environment, PARENT_VARIABLE: str(os.getpid())}
    with process.log.open("ab") as log:
        return subprocess.Popen(
            list(process.command),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            process_group=0,
        )


def _first_failure(running: list[_Running]) -> int | None:
    """Exit code of the first process that failed or ended too early, after saying so."""
    for entry in running:
        code = entry.handle.poll()
        if code is None or (code == 0 and entry.process.ends_run):
            continue
        if code < 0:
            reason = f"was killed by {signal.Signals(-code).name}"
        elif code == 0:
            reason = "ended although the run still needs it"
        else:
            reason = f"failed with exit code {code}"
        logger.error("%s %s; ending the run", entry.process.name, reason)
        logger.error("last lines of %s:\n%s", entry.process.log, _tail(entry.process))
        return 128 - code if code < 0 else max(code, 1)
    return None


def _tail(process: Process) -> str:
    lines = process.log.read_text(errors="replace").splitlines()
    return "\n".join(f"  {line}" for line in lines[-LOG_TAIL_LINES:])


def _signal_group(handle: subprocess.Popen[bytes], number: int) -> None:
    """Signal every process of the group; the leader may already be gone and its children not."""
    try:
        os.killpg(handle.pid, number)
    except ProcessLookupError:
        return


@contextmanager
def _deferred_signals() -> Iterator[list[int]]:
    """Collect SIGINT and SIGTERM instead of dying from them; restores the handlers."""
    received: list[int] = []

    def note(number: int, frame: Any) -> None:
        received.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
