"""Waits for the other processes of a stage to publish where they listen."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from prime_rl.errors import RunError

POLL_S = 0.05


async def read_when_there(path: Path, meaning: str, timeout_s: float) -> str:
    """The one line of a discovery file. Raises RunError when it does not appear in time."""
    deadline = time.monotonic() + timeout_s
    while True:
        if path.exists() and (text := path.read_text().strip()):
            return text
        if time.monotonic() > deadline:
            raise RunError(f"{meaning} was not ready within {timeout_s:g} s ({path})")
        await asyncio.sleep(POLL_S)


def publish(path: Path, text: str) -> None:
    """Write a discovery file: readers see all of it or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n")
    temporary.replace(path)
