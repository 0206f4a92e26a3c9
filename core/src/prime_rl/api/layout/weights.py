"""The whole layout of a model: entries, what a checkpoint may hold besides, and what follows."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from prime_rl.api.layout.expressions import Cat, Expression, Part, Permute, Squeeze, Stack
from prime_rl.api.layout.leaf import Leaf, Piece, Shape, whole
from prime_rl.api.transport import NamedTensor
from prime_rl.errors import WeightError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One runtime tensor."""

    runtime: str
    """Name in the module's state dict."""
    source: Expression
    """How it is composed; saving writes this form."""
    alternatives: tuple[Expression, ...] = ()
    """Other forms that loading accepts."""

    def forms(self) -> tuple[Expression, ...]:
        """Every form, the written one first."""
        return (self.source, *self.alternatives)

    def choose(self, present: Collection[str]) -> Expression:
        """The first form whose tensors are all present.

        Raises WeightError naming what the most complete form lacks.
        """
        fewest: list[str] | None = None
        for form in self.forms():
            missing = [leaf.name for leaf in form.leaves() if _found(leaf, present) is None]
            if not missing:
                return form
            if fewest is None or len(missing) < len(fewest):
                fewest = missing
        assert fewest is not None
        raise WeightError(
            f"{_shown(fewest)} missing from the checkpoint, needed for {self.runtime}"
            f"{_near_text(fewest[0], present)}"
        )


@dataclass(frozen=True)
class Ignored:
    """Checkpoint names that are legal and not loaded."""

    pattern: str
    """Glob over checkpoint names."""
    reason: str
    keep: bool = False
    """Copied through to an export."""

    def matches(self, name: str) -> bool:
        """The name is covered."""
        return fnmatch.fnmatchcase(name, self.pattern)


class TableRow(NamedTuple):
    """One line of the tensor table: what a saved checkpoint holds."""

    name: str
    shape: Shape
    dtype: str | None
    """Fixed dtype, or None: the export's."""
    runtimes: tuple[str, ...]
    """Runtime tensors that hold it; more than one after a split."""


class Claim(NamedTuple):
    """Who reads a checkpoint name."""

    entry: Entry
    form: int
    """Index into entry.forms()."""
    leaf: Leaf
    is_scale: bool


@dataclass(frozen=True)
class WeightLayout:
    """A model's layout. Construct it with `WeightLayout.of(rule, rule, ...)`.

    Raises WeightError when a runtime name is produced twice or a checkpoint name claimed by two
    entries (slices of one tensor apart).
    """

    entries: dict[str, Entry]
    """By runtime name, in saving order."""
    ignored: tuple[Ignored, ...] = ()
    claims: dict[str, tuple[Claim, ...]] = field(default_factory=dict, repr=False)
    """By checkpoint name, aliases and scales included."""

    @classmethod
    def of(cls, *rules: Iterable[Entry | Ignored]) -> WeightLayout:
        """The layout made of these rules."""
        entries: dict[str, Entry] = {}
        ignored: list[Ignored] = []
        for item in (item for rule in rules for item in rule):
            if isinstance(item, Ignored):
                ignored.append(item)
            elif item.runtime in entries:
                raise WeightError(f"the layout produces runtime tensor {item.runtime} twice")
            else:
                entries[item.runtime] = item
        return cls(entries, tuple(ignored), _claims(entries.values()))

    def runtime_for(self, name: str) -> tuple[str, ...]:
        """Runtime tensors that a checkpoint name feeds; () when it is ignored.

        Raises WeightError with near matches for a name the layout does not know.
        """
        if name in self.claims:
            return tuple(claim.entry.runtime for claim in self.claims[name])
        if self.is_ignored(name):
            return ()
        raise WeightError(self.describe_unknown(name))

    def is_ignored(self, name: str) -> bool:
        """The name is legal and not loaded."""
        return any(rule.matches(name) for rule in self.ignored)

    def is_kept(self, name: str) -> bool:
        """The name is not loaded but copied through to exports."""
        return any(rule.keep and rule.matches(name) for rule in self.ignored)

    def describe_unknown(self, name: str) -> str:
        """Message for a checkpoint name that nothing claims."""
        return (
            f"{name} in the checkpoint belongs to no runtime tensor{_near_text(name, self.claims)}"
        )

    def check_runtime(self, names: Iterable[str]) -> None:
        """Raise WeightError unless the layout produces exactly these runtime tensors."""
        found = set(names)
        extra = sorted(found - self.entries.keys())
        if extra:
            raise WeightError(
                f"runtime tensor {_shown(extra)} is not in the layout"
                f"{_near_text(extra[0], self.entries)}"
            )
        absent = sorted(self.entries.keys() - found)
        if absent:
            raise WeightError(
                f"the layout produces {_shown(absent)}, which the module does not have"
                f"{_near_text(absent[0], found)}"
            )

    def choose(self, present: Collection[str]) -> dict[str, Expression]:
        """The form of every entry that a checkpoint with these names uses.

        Raises WeightError naming the first tensor that is missing, or that nothing claims.
        """
        unknown = [n for n in present if n not in self.claims and not self.is_ignored(n)]
        if unknown:
            more = f" (and {len(unknown) - 1} more such)" if len(unknown) > 1 else ""
            raise WeightError(self.describe_unknown(sorted(unknown)[0]) + more)
        forms = {name: entry.choose(present) for name, entry in self.entries.items()}
        used = {
            found
            for form in forms.values()
            for leaf in form.leaves()
            for found in (_found(leaf, present), _found_scale(leaf, present))
            if found is not None
        }
        for name in present:
            if name not in used and not self.is_ignored(name):
                raise WeightError(
                    f"{name} and another form of the same tensor are both in the checkpoint; "
                    f"expected one of them for {', '.join(self.runtime_for(name))}"
                )
        return forms

    def to_checkpoint(self, runtime: str, tensor: Tensor) -> Iterator[NamedTensor]:
        """The checkpoint tensors that a full runtime tensor holds, as views of it.

        Raises WeightError for an unknown name, and for a tensor that is only a slice of a
        checkpoint tensor: use `stream`.
        """
        yield from self.stream([(runtime, tensor)])

    def stream(
        self, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None = None
    ) -> Iterator[NamedTensor]:
        """Checkpoint tensors of full runtime tensors, one by one.

        `dtype` converts floating tensors, except those whose dtype the layout fixes. A checkpoint
        tensor shared by several runtime tensors is yielded after the last of them.
        """
        partial: dict[str, list[Piece]] = {}
        for runtime, tensor in tensors:
            if runtime not in self.entries:
                raise WeightError(f"runtime tensor {_shown([runtime])} is not in the layout")
            shape = tuple(tensor.shape)
            for piece in self.entries[runtime].source.pieces(shape, whole(shape), tensor):
                name = piece.leaf.name
                if piece.is_whole:
                    assert piece.view is not None
                    yield NamedTensor(name, _saved(piece.leaf, piece.view, dtype))
                    continue
                partial.setdefault(name, []).append(piece)
                joined = _joined(partial[name])
                if joined is not None:
                    del partial[name]
                    yield NamedTensor(name, _saved(piece.leaf, joined, dtype))
        if partial:
            raise WeightError(f"{_shown(sorted(partial))} was given in part only")

    def table(self, shapes: Mapping[str, Shape]) -> list[TableRow]:
        """Every checkpoint tensor that saving writes, from the runtime shapes."""
        rows: dict[str, TableRow] = {}
        for runtime, entry in self.entries.items():
            shape = shapes[runtime]
            for piece in entry.source.pieces(shape, whole(shape), None):
                leaf = piece.leaf
                before = rows[leaf.name].runtimes if leaf.name in rows else ()
                rows[leaf.name] = TableRow(leaf.name, piece.shape, leaf.dtype, (*before, runtime))
        return list(rows.values())


def _claims(entries: Iterable[Entry]) -> dict[str, tuple[Claim, ...]]:
    claims: dict[str, tuple[Claim, ...]] = {}
    sliced: set[str] = set()
    for entry in entries:
        for index, form in enumerate(entry.forms()):
            for leaf, is_slice in _leaves(form, False):
                scales = leaf.scale.names if leaf.scale is not None else ()
                for name in (*leaf.names, *scales):
                    before = claims.get(name, ())
                    if name in scales and before and _is_shared_scale(leaf, before[-1]):
                        continue
                    is_shared = is_slice and name in sliced
                    if before and (not is_shared or before[-1].entry is entry):
                        raise WeightError(
                            f"the layout claims {name} twice: for {before[0].entry.runtime} "
                            f"and for {entry.runtime}"
                        )
                    if is_slice:
                        sliced.add(name)
                    claims[name] = (*before, Claim(entry, index, leaf, name in scales))
    return claims


def _is_shared_scale(leaf: Leaf, before: Claim) -> bool:
    """Both tensors have the same one number as their scale."""
    assert leaf.scale is not None
    other = before.leaf.scale
    return before.is_scale and other is not None and leaf.scale.block is other.block is None


def _leaves(form: Expression, is_slice: bool) -> Iterator[tuple[Leaf, bool]]:
    """The leaves, and whether the form holds only a slice of each."""
    match form:
        case Leaf():
            yield form, is_slice
        case Part(part):
            yield from _leaves(part, True)
        case Permute(part) | Squeeze(part):
            yield from _leaves(part, is_slice)
        case Cat(parts) | Stack(parts):
            for part in parts:
                yield from _leaves(part, is_slice)


def _found(leaf: Leaf, present: Collection[str]) -> str | None:
    return next((name for name in leaf.names if name in present), None)


def _found_scale(leaf: Leaf, present: Collection[str]) -> str | None:
    if leaf.scale is None:
        return None
    return next((name for name in leaf.scale.names if name in present), None)


def _saved(leaf: Leaf, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    import torch

    if leaf.dtype is not None:
        return tensor.to(getattr(torch, leaf.dtype))
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def _joined(pieces: list[Piece]) -> Tensor | None:
    """The full checkpoint tensor when the pieces cover it, else None."""
    import math

    import torch

    shape = pieces[0].shape
    covered = sum(math.prod(stop - start for start, stop in piece.region) for piece in pieces)
    if covered < math.prod(shape):
        return None
    first = pieces[0].view
    assert first is not None
    joined = torch.empty(shape, dtype=first.dtype, device=first.device)
    for piece in pieces:
        assert piece.view is not None
        joined[tuple(slice(start, stop) for start, stop in piece.region)] = piece.view
    return joined


def _shown(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"


def _near_text(name: str, candidates: Iterable[str]) -> str:
    """`; near: a, b` with known names that look like this one."""
    known = list(candidates)
    if len(known) > 2000:  # difflib is slow: compare only names of the same layer and expert
        numbers = re.findall(r"\d+", name)
        known = [other for other in known if re.findall(r"\d+", other) == numbers][:2000]
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    return f"; near: {', '.join(near)}" if near else ""
