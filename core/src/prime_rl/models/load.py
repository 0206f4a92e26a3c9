"""Fills a module's weights from a checkpoint or from a stream of named tensors, piece by piece."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

from prime_rl.api.layout import Expression, Leaf, Piece, Region, Shape, WeightLayout, whole
from prime_rl.api.layout.leaf import extents
from prime_rl.api.layout.weights import Claim
from prime_rl.errors import WeightError
from prime_rl.models import dequantise
from prime_rl.models.sharded import is_sharded
from prime_rl.models.tensor_files import TensorFiles, TensorInfo, WeightSource


def runtime_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The tensors a layout speaks of: parameters and persistent buffers by name, each once."""
    named: dict[str, Tensor] = dict(module.named_parameters())
    persistent = module.state_dict(keep_vars=True).keys()
    named.update((name, b) for name, b in module.named_buffers() if name in persistent)
    return named


def local_part(tensor: Tensor) -> tuple[Tensor, Region]:
    """The part of a (possibly sharded) tensor that this process holds, and its box in the whole."""
    if not is_sharded(tensor):
        return tensor.detach(), whole(tuple(tensor.shape))
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, offsets = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    region = tuple((offset, offset + size) for size, offset in zip(sizes, offsets, strict=True))
    local: Tensor = tensor.to_local()
    return local.detach(), region


@torch.no_grad()
def load_weights(
    module: nn.Module,
    layout: WeightLayout,
    source: WeightSource | Path,
    device: str | torch.device | None = None,
) -> None:
    """Fill every runtime tensor from a checkpoint, one checkpoint tensor at a time.

    A module on the meta device is given memory on `device` first. Sharded parameters read only
    their own box. Values are converted to the runtime tensor's dtype. Raises WeightError naming the
    tensor that is missing, unknown or mis-shaped, before anything is written.
    """
    if isinstance(source, Path):
        source = TensorFiles(source)
    tensors = runtime_tensors(module)
    layout.check_runtime(tensors)
    forms = layout.choose(source.names())
    _check_shapes(forms, tensors, source)
    if any(tensor.is_meta for tensor in tensors.values()):
        module.to_empty(device=device or "cpu")
        tensors = runtime_tensors(module)
    for name, form in forms.items():
        local, region = local_part(tensors[name])
        if local.numel() == 0:
            continue
        for piece in form.pieces(tuple(tensors[name].shape), region, local):
            copy_piece(piece, source)


@torch.no_grad()
def load_named(
    module: nn.Module, layout: WeightLayout, named: Iterable[tuple[str, Tensor]]
) -> None:
    """Overwrite every weight, in place, with checkpoint tensors that come in any order.

    Each is copied into place when it arrives, so nothing accumulates but scales and the tensors
    that wait for theirs. Loading the same set twice changes nothing. Raises WeightError for an
    unknown, repeated or mis-shaped tensor at once, and for an incomplete set at the end; the
    weights are then a mixture and must be loaded again.
    """
    tensors = runtime_tensors(module)
    layout.check_runtime(tensors)
    _StreamLoad(layout, tensors).run(named)


class _StreamLoad:
    """The state of one `load_named`."""

    def __init__(self, layout: WeightLayout, tensors: dict[str, Tensor]) -> None:
        self.layout = layout
        self.tensors = tensors
        self.seen: set[str] = set()
        self.forms: dict[str, int] = {}
        """The form in which each runtime tensor arrives, fixed by its first tensor."""
        self.pieces: dict[str, dict[str, list[Piece]]] = {}
        """Runtime name -> leaf name -> pieces, while the runtime tensor is incomplete."""
        self.waiting: dict[str, Tensor] = {}
        """Quantised tensors and scales whose partner has not come."""
        self.shared: dict[str, Tensor] = {}
        """Scales without blocks, kept for all tensors that share them."""

    def run(self, named: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in named:
            self._take(name, tensor)
        incomplete = next((name for name, left in self.pieces.items() if left), None)
        absent = next((name for name in self.layout.entries if name not in self.forms), None)
        if incomplete is not None:
            names = sorted(self.pieces[incomplete])
            raise WeightError(
                f"{names[0]} did not come ({len(names)} missing for {incomplete}); "
                f"{len(self.seen)} tensors came"
            )
        if absent is not None:
            names = [leaf.name for leaf in self.layout.entries[absent].source.leaves()]
            raise WeightError(f"{names[0]} did not come, needed for {absent}")

    def _take(self, name: str, tensor: Tensor) -> None:
        if name in self.seen:
            raise WeightError(f"{name} came twice in one set")
        claims = self.layout.claims.get(name)
        if claims is None:
            if self.layout.is_ignored(name):
                return
            raise WeightError(self.layout.describe_unknown(name))
        self.seen.add(name)
        leaf = claims[0].leaf  # the same for all: several claims are slices of one tensor
        if claims[0].is_scale and leaf.scale is not None and leaf.scale.block is None:
            self._take_shared_scale(name, tensor)
            return
        self._place(name, claims, self._with_partner(leaf, name, tensor, claims[0].is_scale))

    def _take_shared_scale(self, name: str, tensor: Tensor) -> None:
        """Place every tensor that waited for it."""
        self.shared[name] = tensor.clone()
        for waiting in list(self.waiting):
            claims = self.layout.claims[waiting]
            scale = claims[0].leaf.scale
            if scale is not None and name in scale.names and scale.block is None:
                both = {waiting: self.waiting.pop(waiting), name: self.shared[name]}
                self._place(waiting, claims, TensorTable(both))

    def _place(self, name: str, claims: tuple[Claim, ...], source: TensorTable | None) -> None:
        """Copy the tensor into its runtime tensors; without `source` only note that it came."""
        leaf = claims[0].leaf
        for claim in claims:
            left = self._open(claim, name)
            if leaf.name not in left:
                raise WeightError(f"{name} came after {leaf.name} was complete under another name")
            if source is None:
                continue
            for piece in left.pop(leaf.name):
                _check_piece(piece, source, claim.entry.runtime)
                copy_piece(piece, source)

    def _open(self, claim: Claim, name: str) -> dict[str, list[Piece]]:
        """What the runtime tensor still waits for."""
        runtime = claim.entry.runtime
        if runtime not in self.forms:
            self.forms[runtime] = claim.form
            local, region = local_part(self.tensors[runtime])
            shape = tuple(self.tensors[runtime].shape)
            form = claim.entry.forms()[claim.form]
            left: dict[str, list[Piece]] = {leaf.name: [] for leaf in form.leaves()}
            for piece in form.pieces(shape, region, local):
                left[piece.leaf.name].append(piece)
            self.pieces[runtime] = left
        if self.forms[runtime] != claim.form:
            raise WeightError(f"{name} is another form of {runtime}, which came before")
        return self.pieces[runtime]

    def _with_partner(
        self, leaf: Leaf, name: str, tensor: Tensor, is_scale: bool
    ) -> TensorTable | None:
        """The tensor, with its scale when it needs one; None while the partner is missing."""
        if leaf.scale is None or not (is_scale or dequantise.is_quantised(tensor.dtype)):
            return TensorTable({name: tensor})
        shared = next((n for n in leaf.scale.names if n in self.shared), None)
        if shared is not None:
            return TensorTable({name: tensor, shared: self.shared[shared]})
        self.waiting[name] = tensor.clone()
        both = (
            next((n for n in names if n in self.waiting), None)
            for names in (leaf.names, leaf.scale.names)
        )
        weight_name, scale_name = both
        if weight_name is None or scale_name is None:
            return None
        return TensorTable({n: self.waiting.pop(n) for n in (weight_name, scale_name)})


class TensorTable:
    """Tensors in memory as a WeightSource."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors

    def names(self) -> Collection[str]:
        """Every name."""
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype."""
        tensor = self.tensors[name]
        return TensorInfo(tuple(tensor.shape), tensor.dtype)

    def read(self, name: str, region: Region) -> Tensor:
        """A view of the box."""
        return self.tensors[name][tuple(slice(start, stop) for start, stop in region)]


def copy_piece(piece: Piece, source: WeightSource) -> None:
    """Read one piece and convert it into its view."""
    assert piece.view is not None
    if 0 in extents(piece.region):
        return
    name = _stored_name(piece.leaf, source)
    dtype = source.info(name).dtype
    if piece.leaf.scale is None or not dequantise.is_quantised(dtype):
        piece.view.copy_(source.read(name, piece.region))
        return
    scale_name = next(n for n in piece.leaf.scale.names if n in source.names())
    block = dequantise.block_of(piece.leaf.scale, dtype)
    if block is None:
        piece.view.copy_(source.read(name, piece.region))
        scale = source.read(scale_name, whole(source.info(scale_name).shape))
        piece.view.mul_(scale.float().reshape(()).to(piece.view.device))
        return
    stored = source.read(name, dequantise.stored_region(piece.region, dtype))
    scales = source.read(scale_name, dequantise.scale_region(piece.region, block))
    piece.view.copy_(dequantise.dequantise(stored, scales, piece.region, block))


def _check_shapes(
    forms: dict[str, Expression], tensors: dict[str, Tensor], source: WeightSource
) -> None:
    for runtime, form in forms.items():
        shape = tuple(tensors[runtime].shape)
        for piece in form.pieces(shape, whole(shape), None):
            _check_piece(piece, source, runtime)


def _check_piece(piece: Piece, source: WeightSource, runtime: str) -> None:
    name = _stored_name(piece.leaf, source)
    shape, dtype = source.info(name)
    quantised = piece.leaf.scale is not None and dequantise.is_quantised(dtype)
    expected = dequantise.stored_shape(piece.shape, dtype) if quantised else piece.shape
    if shape != expected:
        raise _mis_shaped(name, shape, expected, runtime)
    if not quantised:
        return
    assert piece.leaf.scale is not None
    scale = next((n for n in piece.leaf.scale.names if n in source.names()), None)
    if scale is None:
        raise WeightError(
            f"{piece.leaf.scale.name} is missing from the checkpoint: {name} is stored in {dtype} "
            "and needs its scales"
        )
    block = dequantise.block_of(piece.leaf.scale, dtype)
    expected = (1,) if block is None else dequantise.scale_shape(piece.shape, block)
    if source.info(scale).shape != expected and (block or source.info(scale).shape):
        raise _mis_shaped(scale, source.info(scale).shape, expected, runtime)


def _stored_name(leaf: Leaf, source: WeightSource) -> str:
    with contextlib.suppress(StopIteration):
        return next(name for name in leaf.names if name in source.names())
    raise WeightError(f"{leaf.name} is missing from the checkpoint")


def _mis_shaped(name: str, found: Shape, expected: Shape, runtime: str) -> WeightError:
    return WeightError(
        f"{name} has shape {list(found)}, expected {list(expected)} for runtime tensor {runtime}"
    )
