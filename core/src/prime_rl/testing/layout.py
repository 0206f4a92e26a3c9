"""Laws of a weight layout, checked on a module with random weights. Used by the model kit."""

from __future__ import annotations

import random
from collections.abc import Collection
from typing import TYPE_CHECKING

from prime_rl.api.layout import Region, WeightLayout, whole
from prime_rl.errors import WeightError

if TYPE_CHECKING:
    from torch import Tensor, nn

    from prime_rl.models.tensor_files import TensorInfo


class RecordingSource:
    """Checkpoint tensors in memory that count the numbers read."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.numbers_read = 0

    def names(self) -> Collection[str]:
        """Every name."""
        return self.tensors.keys()

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype."""
        from prime_rl.models.tensor_files import TensorInfo

        return TensorInfo(tuple(self.tensors[name].shape), self.tensors[name].dtype)

    def read(self, name: str, region: Region) -> Tensor:
        """A copy of the box."""
        box = self.tensors[name][tuple(slice(start, stop) for start, stop in region)]
        self.numbers_read += box.numel()
        return box.clone()


def saved(module: nn.Module, layout: WeightLayout) -> dict[str, Tensor]:
    """Copies of the module's checkpoint tensors; fails when a name comes twice."""
    from prime_rl.models.save import iter_checkpoint

    tensors: dict[str, Tensor] = {}
    for name, tensor in iter_checkpoint(module, layout):
        assert name not in tensors, f"{name} is written twice"
        tensors[name] = tensor.clone()
    return tensors


def assert_round_trip(module: nn.Module, other: nn.Module, layout: WeightLayout) -> None:
    """Saving `module` and loading it into `other` keeps names, shapes and bits, both ways, in any
    order of arrival, once or twice (BL-077, BL-079)."""
    from prime_rl.models.load import load_named, load_weights, runtime_tensors

    checkpoint = saved(module, layout)
    table = {row.name: row.shape for row in layout.table(_shapes(module))}
    assert table == {name: tuple(tensor.shape) for name, tensor in checkpoint.items()}, (
        "the tensor table disagrees with what is saved"
    )
    for name in checkpoint:
        assert layout.runtime_for(name), f"{name} is saved, but nothing reads it"
    wanted = {name: tensor.detach().clone() for name, tensor in runtime_tensors(module).items()}
    shuffled = list(checkpoint.items())
    random.Random(0).shuffle(shuffled)
    source = RecordingSource(checkpoint)
    for load in (
        lambda: load_weights(other, layout, source),
        lambda: load_named(other, layout, shuffled),
        lambda: load_named(other, layout, shuffled),
    ):
        load()
        for name, tensor in runtime_tensors(other).items():
            assert tensor.detach().equal(wanted[name]), f"{name} changed between save and load"
    again = saved(other, layout)
    assert list(again) == list(checkpoint), "the order of names changed"
    for name, tensor in again.items():
        assert tensor.equal(checkpoint[name]), f"{name} changed between load and save"


def assert_shards_load(module: nn.Module, layout: WeightLayout, parts: int = 3) -> None:
    """Any slice along the first dimension loads on its own and equals the slice of the whole."""
    import torch

    from prime_rl.models.load import copy_piece, runtime_tensors

    source = RecordingSource(saved(module, layout))
    forms = layout.choose(source.names())
    for name, tensor in runtime_tensors(module).items():
        if tensor.dim() == 0:
            continue
        for rows in torch.arange(tensor.shape[0]).chunk(parts):
            start, stop = int(rows[0]), int(rows[-1]) + 1
            shape = tuple(tensor.shape)
            region = ((start, stop), *whole(shape[1:]))
            local = torch.full_like(tensor[start:stop].detach(), 7)
            for piece in forms[name].pieces(shape, region, local):
                copy_piece(piece, source)
            assert local.equal(tensor[start:stop].detach()), f"{name}: rows {start} to {stop}"


def assert_wrong_checkpoints_fail(
    module: nn.Module, other: nn.Module, layout: WeightLayout, samples: int = 12
) -> None:
    """A missing, an unknown or a mis-shaped tensor is refused, by name."""
    import torch

    checkpoint = saved(module, layout)
    chosen = random.Random(0).sample(sorted(checkpoint), min(samples, len(checkpoint)))
    for name in chosen:
        missing = {key: value for key, value in checkpoint.items() if key != name}
        _assert_refused(other, layout, missing, name, "a missing tensor")
        misspelt = {key + "x" if key == name else key: t for key, t in checkpoint.items()}
        _assert_refused(other, layout, misspelt, name, "a misspelt name")
        grown = torch.cat([checkpoint[name].flatten()[:1], checkpoint[name].flatten()])
        _assert_refused(other, layout, {**checkpoint, name: grown}, name, "a mis-shaped tensor")
    _assert_refused(
        other, layout, {**checkpoint, "not.a.tensor": grown}, "not.a.tensor", "an extra"
    )


def _assert_refused(
    module: nn.Module, layout: WeightLayout, tensors: dict[str, Tensor], name: str, what: str
) -> None:
    from prime_rl.models.load import load_named, load_weights

    for load in (
        lambda: load_weights(module, layout, RecordingSource(tensors)),
        lambda: load_named(module, layout, list(tensors.items())),
    ):
        try:
            load()
        except WeightError as error:
            assert name in str(error), f"{what}: the message does not name {name}: {error}"
        else:
            raise AssertionError(f"{what} is accepted: {name}")


def _shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    from prime_rl.models.load import runtime_tensors

    return {name: tuple(tensor.shape) for name, tensor in runtime_tensors(module).items()}
