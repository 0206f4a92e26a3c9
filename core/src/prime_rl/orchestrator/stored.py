"""Reads parts of a checkpoint's state, which may be damaged."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec

from prime_rl.errors import CheckpointError

T = TypeVar("T")

NotNegative = Annotated[int, msgspec.Meta(ge=0)]

OTHER_WAY = (
    "Use an undamaged checkpoint, or resume.skip_dataloader = true, which starts the order of tasks, "
    "the samplers and the algorithms anew"
)


def as_stored(values: Any, kind: type[T], what: str) -> T:
    """The plain values as `kind`. Raises CheckpointError when they are not of that form; `what` names
    the part, as "the order of tasks"."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise is_damaged(what, str(error), values) from error


def is_damaged(what: str, problem: str, found: Any) -> CheckpointError:
    """The error of a part whose values cannot be."""
    return CheckpointError(f"{what} is damaged: {problem}; found {found!r:.80}. {OTHER_WAY}")
