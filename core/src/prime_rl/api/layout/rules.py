"""The rules a model writes its layout with. Each takes name templates and the ranges to fill in.

    rename("layers.{i}.norm.weight", "model.layers.{i}.input_layernorm.weight", i=range(layers))

Every rule returns the entries for all combinations of its ranges.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

from prime_rl.api.layout.expressions import Cat, Expression, Part, Permute, Squeeze, Stack
from prime_rl.api.layout.leaf import Leaf, Scale
from prime_rl.api.layout.weights import Entry, Ignored

Source = str | Sequence[str] | Leaf
"""A name template; several: the first is written, all are accepted; or a Leaf of templates."""


def rename(
    runtime: str,
    source: Source,
    *,
    permute: tuple[int, ...] | None = None,
    squeeze: int | None = None,
    alternatives: Sequence[Expression] = (),
    **ranges: Iterable[int],
) -> list[Entry]:
    """A runtime tensor is one checkpoint tensor, its dimensions permuted if asked.

    `squeeze` is a dimension of size 1 that only the checkpoint has. `alternatives` are other ways a
    checkpoint may hold the tensor, as expressions of templates.
    """
    expression: Expression = _leaf(source)
    if squeeze is not None:
        expression = Squeeze(expression, squeeze)
    if permute is not None:
        expression = Permute(expression, permute)
    return _entries(runtime, expression, alternatives, ranges)


def fuse(
    runtime: str,
    sources: Sequence[Source],
    *,
    dim: int = 0,
    sizes: Sequence[int] | None = None,
    alternatives: Sequence[Expression] = (),
    **ranges: Iterable[int],
) -> list[Entry]:
    """A runtime tensor is several checkpoint tensors after each other along `dim`.

    `sizes` are their sizes along it, by default equal.
    """
    parts = tuple(_leaf(source) for source in sources)
    expression = Cat(parts, dim, None if sizes is None else tuple(sizes))
    return _entries(runtime, expression, alternatives, ranges)


def stack_experts(
    runtime: str,
    sources: Sequence[Source],
    experts: Iterable[int],
    *,
    alternatives: Sequence[Expression] = (),
    **ranges: Iterable[int],
) -> list[Entry]:
    """A runtime tensor [E, ...] is one checkpoint tensor per expert, or several fused by rows.

    The templates use `{e}` for the expert: `stack_experts("l.gate_up", ["x.{e}.gate", "x.{e}.up"],
    range(8))`. `alternatives` are checkpoints that hold the experts already stacked.
    """
    leaves = [_leaf(source) for source in sources]
    per_expert: Expression = leaves[0] if len(leaves) == 1 else Cat(tuple(leaves))
    stacked = Stack(tuple(_filled(per_expert, {"e": expert}) for expert in experts))
    return _entries(runtime, stacked, alternatives, ranges)


def split(
    source: Source, runtimes: Mapping[str, int], *, dim: int = 0, **ranges: Iterable[int]
) -> list[Entry]:
    """One checkpoint tensor is several runtime tensors after each other along `dim`.

    `runtimes` gives each runtime template its size along `dim`, in checkpoint order.
    """
    total = sum(runtimes.values())
    entries: list[Entry] = []
    start = 0
    for runtime, size in runtimes.items():
        entries += _entries(runtime, Part(_leaf(source), start, total, dim), (), ranges)
        start += size
    return entries


def ignore(pattern: str, reason: str, *, keep: bool = False) -> list[Ignored]:
    """Checkpoint names that match the glob pattern are legal and not loaded.

    `keep`: an export copies them through unchanged (draft layers that only a server uses).
    """
    return [Ignored(pattern, reason, keep)]


def tie(*names: str) -> list[Ignored]:
    """Checkpoint names that repeat another tensor: accepted on load, never written."""
    return [Ignored(name, "tied to another tensor", False) for name in names]


def _leaf(source: Source) -> Leaf:
    if isinstance(source, Leaf):
        return source
    if isinstance(source, str):
        return Leaf(source)
    return Leaf(source[0], tuple(source[1:]))


def _entries(
    runtime: str,
    expression: Expression,
    alternatives: Sequence[Expression],
    ranges: Mapping[str, Iterable[int]],
) -> list[Entry]:
    return [
        Entry(
            _fill(runtime, values),
            _filled(expression, values),
            tuple(_filled(alternative, values) for alternative in alternatives),
        )
        for values in _combinations(ranges)
    ]


def _combinations(ranges: Mapping[str, Iterable[int]]) -> Iterator[dict[str, int]]:
    for values in itertools.product(*ranges.values()):
        yield dict(zip(ranges, values, strict=True))


def _filled(expression: Expression, values: Mapping[str, int]) -> Expression:
    """The expression with its templates filled in as far as `values` goes."""
    match expression:
        case Leaf(name, aliases, dtype, scale):
            filled_scale = scale and Scale(
                _fill(scale.name, values),
                tuple(_fill(alias, values) for alias in scale.aliases),
                scale.block,
                scale.fp4_block,
            )
            filled_aliases = tuple(_fill(alias, values) for alias in aliases)
            return Leaf(_fill(name, values), filled_aliases, dtype, filled_scale)
        case Cat(parts, dim, sizes):
            return Cat(tuple(_filled(part, values) for part in parts), dim, sizes)
        case Stack(parts):
            return Stack(tuple(_filled(part, values) for part in parts))
        case Permute(part, dims):
            return Permute(_filled(part, values), dims)
        case Squeeze(part, dim):
            return Squeeze(_filled(part, values), dim)
        case Part(part, start, total, dim):
            return Part(_filled(part, values), start, total, dim)


def _fill(template: str, values: Mapping[str, int]) -> str:
    for key, value in values.items():
        template = template.replace("{" + key + "}", str(value))
    return template
