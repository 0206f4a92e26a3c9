"""No process outlives its parent: a killed launcher must leave nothing behind.

On Linux the kernel sends SIGTERM when the parent dies; elsewhere a thread watches the parent's id.
`python -m prime_rl.control.lifetime COMMAND ...` gives the same to a program that is not ours.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
PARENT_VARIABLE = "PRIME_RL_PARENT"


def end_with_parent() -> None:
    """Ask for SIGTERM when the parent dies. Call once, early, in the main thread.

    Nothing happens in a process that the launcher did not start: a user's own `prime serve` may
    outlive its shell.
    """
    expected = os.environ.get(PARENT_VARIABLE)
    if expected is None:
        return
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    parent = os.getppid()
    if "RANK" not in os.environ and parent != int(expected):
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


def _watch(parent: int, interval_s: float = 1.0, grace_s: float = 10.0) -> None:
    while os.getppid() == parent:
        time.sleep(interval_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(143)


def _run(command: list[str]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(os.environ.get(PARENT_VARIABLE, os.getppid())):
        sys.exit(143)
    os.execvp(command[0], command)


if __name__ == "__main__":
    _run(sys.argv[1:])
