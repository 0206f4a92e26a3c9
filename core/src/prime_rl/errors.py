"""The exception types a user may see. Their text is the whole message: found, expected, what to do."""

from __future__ import annotations

import traceback


class PrimeError(Exception):
    """Base of every error the command line prints without a traceback."""


class ConfigError(PrimeError):
    """A configuration that cannot be used; says the key, the file and the line where known."""


class CheckpointError(PrimeError):
    """A checkpoint or weight file that is missing, incomplete or does not fit the model."""


class WeightError(CheckpointError):
    """Tensors that do not fit the model: missing, unknown, mis-shaped or incomplete. Names them."""


class WeightTransferError(PrimeError):
    """The payload of a weight version is incomplete, damaged or not the one announced."""


class RunError(PrimeError):
    """A run that cannot go on: a process died, a bound was exceeded, a directory is in use."""


class PluginError(PrimeError):
    """A plugin that was asked for and cannot be had.

    Unknown, disabled, incompatible, conflicting, or broken while loading. `original_traceback` is
    the text of the plugin's own traceback ("" when nothing of the plugin ran); the original
    exception is `__cause__`.
    """

    def __init__(
        self,
        message: str,
        *,
        kind: str = "",
        name: str = "",
        distribution: str = "",
        version: str = "",
        target: str = "",
        original_traceback: str = "",
    ) -> None:
        super().__init__(message)
        self.kind = kind
        self.name = name
        self.distribution = distribution
        self.version = version
        self.target = target
        self.original_traceback = original_traceback


def what_was_raised(error: BaseException) -> str:
    """What code of the user's raised, in one line: type, text, and the file and line it came from."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    return f"{line} ({frames[-1].filename}, line {frames[-1].lineno})" if frames else line
