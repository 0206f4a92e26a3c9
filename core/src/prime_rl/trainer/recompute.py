"""Recomputes the activations of a block in backward, but makes no choice a second time."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from prime_rl.api import Kernels

_active = threading.local()


def remember_choices(kernels: Kernels) -> None:
    """Let recomputation take the keys that sparse attention chose in the forward: a second top-k
    might choose others. In place, on the run's own back end."""
    if kernels.dsa is not None:
        kernels.dsa.select = _remembered(kernels.dsa.select)  # type: ignore[method-assign]


def _remembered(select: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(select)
    def remembered(*args: Any, **kwargs: Any) -> Tensor:
        choices: _Choices | None = getattr(_active, "choices", None)
        if choices is None:
            return select(*args, **kwargs)
        return choices.next(lambda: select(*args, **kwargs))

    return remembered


class _Choices:
    """What one block chose, in order."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.given = 0
        self.is_over = False
        """The forward is done: from now on choices are only given again."""

    def next(self, choose: Callable[[], Tensor]) -> Tensor:
        """A new choice in the forward, the same again in recomputation."""
        if not self.is_over:
            self.made.append(choose())
            return self.made[-1]
        self.given += 1
        return self.made[self.given - 1]

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the block's forward."""
        with _making(self):
            yield
        self.is_over = True

    @contextmanager
    def again(self) -> Iterator[None]:
        """Around its recomputation, in whichever thread that runs."""
        self.given = 0
        with _making(self):
            yield


@contextmanager
def _making(choices: _Choices) -> Iterator[None]:
    outer = getattr(_active, "choices", None)
    _active.choices = choices
    try:
        yield
    finally:
        _active.choices = outer


def _contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    choices = _Choices()
    return choices.forward(), choices.again()


def recompute_in_backward(block: nn.Module) -> None:
    """Keep only the block's inputs and what it chose; its forward, compiled or not, runs again in
    backward. Names do not change."""
    forward = block.forward

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts, **kwargs)

    block.forward = checkpointed
