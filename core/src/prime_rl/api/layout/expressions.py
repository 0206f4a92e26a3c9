"""How a runtime tensor is composed of checkpoint tensors: concatenated, stacked, permuted, cut.

Every expression answers `pieces(shape, region, local)`: `shape` is the full runtime shape, `region`
the box of it that this process holds and `local` the tensor that holds it (None to learn shapes
only). A sharded rank therefore touches exactly the checkpoint rows it needs. A checkpoint tensor
that does not meet the region is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prime_rl.api.layout.leaf import Leaf, Piece, Region, Shape
from prime_rl.errors import WeightError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Cat:
    """Parts one after the other along a dimension: fused QKV, gate and up, row-sharded tables."""

    parts: tuple[Expression, ...]
    dim: int = 0
    sizes: tuple[int, ...] | None = None
    """Size of each part along `dim`; None: all equal."""

    def leaves(self) -> Iterator[Leaf]:
        for part in self.parts:
            yield from part.leaves()

    def pieces(self, shape: Shape, region: Region, local: Tensor | None) -> Iterator[Piece]:
        start, stop = region[self.dim]
        offset = 0
        for part, size in zip(self.parts, self._sizes(shape), strict=True):
            low, high = max(start, offset), min(stop, offset + size)
            if low < high:
                view = None if local is None else local.narrow(self.dim, low - start, high - low)
                yield from part.pieces(
                    _replaced(shape, self.dim, size),
                    _replaced(region, self.dim, (low - offset, high - offset)),
                    view,
                )
            offset += size

    def _sizes(self, shape: Shape) -> tuple[int, ...]:
        total = shape[self.dim]
        equal = (total // len(self.parts),) * len(self.parts)
        sizes = equal if self.sizes is None else self.sizes
        if sum(sizes) != total:
            names = ", ".join(leaf.name for leaf in self.leaves())
            raise WeightError(
                f"{names}: parts of sizes {list(sizes)} do not make up dimension {self.dim} of a "
                f"runtime tensor of shape {list(shape)}"
            )
        return sizes


@dataclass(frozen=True)
class Stack:
    """Parts as the entries of a new leading dimension: experts."""

    parts: tuple[Expression, ...]

    def leaves(self) -> Iterator[Leaf]:
        for part in self.parts:
            yield from part.leaves()

    def pieces(self, shape: Shape, region: Region, local: Tensor | None) -> Iterator[Piece]:
        if shape[0] != len(self.parts):
            first = next(self.leaves()).name
            raise WeightError(
                f"{first} and following: {len(self.parts)} stacked tensors do not make up a "
                f"runtime tensor of shape {list(shape)}"
            )
        start, stop = region[0]
        for index in range(start, stop):
            view = None if local is None else local[index - start]
            yield from self.parts[index].pieces(shape[1:], region[1:], view)


@dataclass(frozen=True)
class Permute:
    """A checkpoint tensor with its dimensions in another order.

    `dims[d]` is the checkpoint dimension that runtime dimension d shows, as in `Tensor.permute`
    applied to the checkpoint tensor.
    """

    part: Expression
    dims: tuple[int, ...] = (1, 0)

    def leaves(self) -> Iterator[Leaf]:
        yield from self.part.leaves()

    def pieces(self, shape: Shape, region: Region, local: Tensor | None) -> Iterator[Piece]:
        inverse = tuple(self.dims.index(dim) for dim in range(len(self.dims)))
        yield from self.part.pieces(
            tuple(shape[dim] for dim in inverse),
            tuple(region[dim] for dim in inverse),
            None if local is None else local.permute(inverse),
        )


@dataclass(frozen=True)
class Squeeze:
    """A checkpoint tensor with a dimension of size 1 that the runtime tensor lacks."""

    part: Expression
    dim: int

    def leaves(self) -> Iterator[Leaf]:
        yield from self.part.leaves()

    def pieces(self, shape: Shape, region: Region, local: Tensor | None) -> Iterator[Piece]:
        yield from self.part.pieces(
            (*shape[: self.dim], 1, *shape[self.dim :]),
            (*region[: self.dim], (0, 1), *region[self.dim :]),
            None if local is None else local.unsqueeze(self.dim),
        )


@dataclass(frozen=True)
class Part:
    """A slice of a checkpoint tensor that several runtime tensors share between them."""

    part: Expression
    start: int
    """First row (along `dim`) of the slice."""
    total: int
    """Size of the checkpoint tensor along `dim`."""
    dim: int = 0

    def leaves(self) -> Iterator[Leaf]:
        yield from self.part.leaves()

    def pieces(self, shape: Shape, region: Region, local: Tensor | None) -> Iterator[Piece]:
        start, stop = region[self.dim]
        yield from self.part.pieces(
            _replaced(shape, self.dim, self.total),
            _replaced(region, self.dim, (start + self.start, stop + self.start)),
            local,
        )


Expression = Leaf | Cat | Stack | Permute | Squeeze | Part


def _replaced(items: tuple, dim: int, value: object) -> tuple:
    return (*items[:dim], value, *items[dim + 1 :])
