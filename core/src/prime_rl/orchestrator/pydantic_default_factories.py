"""Patch of pydantic: remember which default factories take the validated data.

`model_construct` asks `inspect.signature` about every default factory of a model each time it makes
one; `verifiers` makes dozens of models per episode, and the answer for a callable never changes.
Measured on one-turn episodes: 12 % of an env server's time. Only env server processes apply it.
It can go when pydantic caches `FieldInfo.default_factory_takes_validated_data` itself (2.14 does
not). Without the patched function (another pydantic) nothing is changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from typing import Any

log = logging.getLogger(__name__)

NAME = "takes_validated_data_argument"


def remember_signatures() -> bool:
    """Apply the patch once; False when there is nothing to patch."""
    from pydantic._internal import _fields

    original = getattr(_fields, NAME, None)
    if original is None:
        log.debug("pydantic has no %s; its default factories stay as they are", NAME)
        return False
    if not isinstance(original, _Remembered):
        setattr(_fields, NAME, _Remembered(original))
    return True


class _Remembered:
    """The function with a memory."""

    def __init__(self, original: Callable[[Any], bool]) -> None:
        self._original = original
        self._answers: dict[Hashable, bool] = {}

    def __call__(self, default_factory: Any) -> bool:
        try:
            answer = self._answers.get(default_factory)
        except TypeError:  # an unhashable callable
            return self._original(default_factory)
        if answer is None:
            answer = self._answers[default_factory] = self._original(default_factory)
        return answer
