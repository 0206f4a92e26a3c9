"""Recomputes the activations of a block in backward, keeping what named operators gave."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from prime_rl.api import Kernels

Contexts = Callable[[], tuple[Any, Any]]


def kept_operators(kernels: Kernels) -> frozenset[str]:
    """Custom operators, as `namespace::name`, whose results recomputation keeps: a second top-k
    might choose others."""
    chosen = [kernels.attention, *kernels.moe, *([kernels.dsa] if kernels.dsa else [])]
    return frozenset(name for part in chosen for name in part.capabilities.get("custom_ops", ()))


def recompute_in_backward(
    block: nn.Module, kept: frozenset[str] = frozenset(), compiled: bool = False
) -> None:
    """Keep only the block's inputs and what the `kept` operators gave; its forward runs again in
    backward. Names do not change. `compiled`: the block will be compiled."""
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": False}
    if kept:
        make = _compiled_contexts if compiled else _eager_contexts
        options["context_fn"] = functools.partial(make, kept)

    @functools.wraps(forward)
    def checkpointed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    block.forward = checkpointed


def _compiled_contexts(kept: frozenset[str]) -> tuple[Any, Any]:
    """torch's own, the only ones that compilers understand."""

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operator.name() in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: tuple[Any, Any] = create_selective_checkpoint_contexts(policy)
    return contexts


def _eager_contexts(kept: frozenset[str]) -> tuple[Any, Any]:
    """Count the kept operators alone. torch's own contexts want every operator as often as in the
    forward, which sharded modules inside the block do not give: they gather their parameters anew."""
    results: dict[str, list[Any]] = defaultdict(list)
    return _Keep(kept, results), _Recall(kept, results)


class _Keep(TorchDispatchMode):
    """Stores what the kept operators give."""

    def __init__(self, kept: frozenset[str], results: dict[str, list[Any]]) -> None:
        super().__init__()
        self.kept, self.results = kept, results

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.name() in self.kept:
            self.results[func.name()].append(tree_map(_alias, result))
        return result


class _Recall(TorchDispatchMode):
    """Gives the stored results again, in their order."""

    def __init__(self, kept: frozenset[str], results: dict[str, list[Any]]) -> None:
        super().__init__()
        self.kept, self.results = kept, results
        self.given: dict[str, int] = defaultdict(int)

    def __enter__(self) -> _Recall:
        self.given.clear()
        super().__enter__()
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name()
        if name not in self.kept:
            return func(*args, **(kwargs or {}))
        number = self.given[name]
        self.given[name] += 1
        return tree_map(_alias, self.results[name][number])


def _alias(value: Any) -> Any:
    """The same memory outside any graph."""
    return value.detach() if isinstance(value, Tensor) else value
