"""Logging of every process: one line format on standard error, captured by the launcher."""

from __future__ import annotations

import logging
import os
import sys

NOISY = ("httpx", "httpcore", "urllib3", "asyncio", "uvicorn.access", "filelock", "matplotlib")


def setup_logging(process: str, level: str = "info") -> None:
    """Send the records of this process to standard error, each line with time, process and rank."""
    rank = os.environ.get("RANK")
    label = process if rank is None else f"{process}:{rank}"
    logging.basicConfig(
        stream=sys.stderr,
        level=level.upper(),
        format=f"%(asctime)s {label} %(levelname)s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
