"""The launcher contract: starts the processes of a stage and watches them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from prime_rl.api.plugin import Plugin


@dataclass(frozen=True)
class Process:
    """One process to start."""

    name: str
    """Unique; names the log file and appears in messages."""
    command: Sequence[str]
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    ends_run: bool = False
    """The stage is over when every process with this flag has ended with code 0."""


class Launcher(Plugin):
    """Runs a stage's processes as one: when one fails, all end."""

    @abstractmethod
    def run(self, processes: Sequence[Process], observe: Callable[[], None] | None = None) -> int:
        """Start everything and return the exit code: 0 when the processes that end the run did so
        with 0; otherwise the code of the first that failed, named in the log. `observe` is called
        a few times a second meanwhile."""
