"""When gradients are summed over ranks. Apart from sharding, so that one rank imports none of it."""

from __future__ import annotations

from torch import nn


def reduce_gradients_now(root: nn.Module, value: bool) -> None:
    """Whether the next backward sums gradients over ranks, or only adds to this rank's own.

    Does nothing to a module that is not sharded.
    """
    switch = getattr(root, "set_requires_gradient_sync", None)
    if switch is not None:
        switch(value)
