"""One checkpoint tensor as a layout sees it, and the piece of a runtime tensor that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]
Region = tuple[tuple[int, int], ...]
"""A box inside a tensor: (start, stop) per dimension."""


def whole(shape: Shape) -> Region:
    """The region that is the whole tensor."""
    return tuple((0, size) for size in shape)


def extents(region: Region) -> Shape:
    """Sizes of a region."""
    return tuple(stop - start for start, stop in region)


@dataclass(frozen=True)
class Scale:
    """Scales that stand beside a quantised tensor.

    The scale tensor has one entry per block, rounded up at the edges: row r uses scale row
    r // block[0]. Without blocks it is one number, which several tensors may share.
    """

    name: str
    aliases: tuple[str, ...] = ()
    block: tuple[int, int] | None = (128, 128)
    """Rows and columns of one FP8 block; None: one number for all of the tensor."""
    fp4_block: tuple[int, int] = (1, 32)
    """Rows and columns of one FP4 block, in unpacked columns."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name a checkpoint may use."""
        return (self.name, *self.aliases)


@dataclass(frozen=True)
class Leaf:
    """One checkpoint tensor."""

    name: str
    """Name that saving writes."""
    aliases: tuple[str, ...] = ()
    """Other names that loading accepts."""
    dtype: str | None = None
    """torch dtype name, such as "float32", in which the tensor is saved whatever the export's."""
    scale: Scale | None = None
    """Set when releases quantise this tensor. FP8 and FP4 are told apart by the stored dtype and
    dequantised on load; an unquantised tensor of the same name needs no scale. Saving writes
    unquantised tensors."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every name a checkpoint may use."""
        return (self.name, *self.aliases)

    def leaves(self) -> Iterator[Leaf]:
        """Itself."""
        yield self

    def pieces(self, shape: Shape, region: Region, local: Tensor | None) -> Iterator[Piece]:
        """The whole runtime tensor is this checkpoint tensor."""
        yield Piece(self, shape, region, local)


class Piece(NamedTuple):
    """The part of a runtime tensor that holds (a region of) one checkpoint tensor."""

    leaf: Leaf
    shape: Shape
    """Shape of the full checkpoint tensor."""
    region: Region
    """Which part of the checkpoint tensor `view` holds."""
    view: Tensor | None
    """View into the runtime tensor, of the region's extents; None when only shapes were asked."""

    @property
    def is_whole(self) -> bool:
        """The view holds the full checkpoint tensor."""
        return self.region == whole(self.shape)
