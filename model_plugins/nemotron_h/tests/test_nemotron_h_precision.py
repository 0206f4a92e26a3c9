"""bfloat16: how far from float32, and what stays float32."""

from dataclasses import replace
from pathlib import Path

import nemotron_h_cases as cases
import torch
from prime_rl_model_nemotron_h.mamba import Recurrence
from torch.utils._python_dispatch import TorchDispatchMode

from prime_rl.api import PackedBatch
from prime_rl.layers.moe import Router
from prime_rl.layers.routing import recording
from prime_rl.models.load import load_weights
from prime_rl.models.setup import ModelSetup, build


def small(directory: Path) -> tuple[ModelSetup, torch.nn.Module, torch.nn.Module]:
    """The same weights in float32 and in bfloat16."""
    cases.theirs().save_pretrained(directory)
    setup, module = cases.ours(directory)
    half = build(setup, dtype=torch.bfloat16)
    load_weights(half, setup.layout, directory)
    return setup, module, half


def test_bfloat16_forward_is_near_float32(tmp_path: Path) -> None:
    """8 bits of mantissa through six layers: 2 % of the norm of the hidden states. Experts are
    those that float32 chose: a rounded score that makes a router choose another expert is no
    rounding error any more."""
    _, module, half = small(tmp_path)
    batch = PackedBatch.from_documents(cases.documents())
    with torch.no_grad(), recording() as record:
        expected = module(batch)
        routes = record.stacked(6)
        found = half(replace(batch, routed_experts=routes)).float()
    assert (found - expected).norm() <= 0.02 * expected.norm()


class Dtypes(TorchDispatchMode):
    """Records in which dtypes each operation was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            name = function.overloadpacket.__name__
            self.seen.setdefault(name, set()).add(result.dtype)
        return result


def test_float32_islands(tmp_path: Path) -> None:
    """Parameters, results and the operations themselves, recorded in a bfloat16 forward."""
    setup, _, half = small(tmp_path)
    islands = setup.plugin.float32_modules(half)
    kinds = [type(module) for module in islands]
    assert kinds.count(Recurrence) == 2 and kinds.count(Router) == 2 and len(kinds) == 4
    exact = {id(tensor) for module in islands for tensor in module.parameters()}
    for name, parameter in half.named_parameters():
        expected = torch.float32 if id(parameter) in exact else torch.bfloat16
        assert parameter.dtype == expected, name
    assert all(buffer.dtype == torch.float32 for buffer in half.buffers())
    results: list[torch.dtype] = []
    for module in islands:
        module.register_forward_hook(
            lambda _, inputs, output: results.append(
                output.dtype if isinstance(output, torch.Tensor) else output[1].dtype
            )
        )
    with torch.no_grad(), Dtypes() as dtypes:
        hidden = half(PackedBatch.from_documents(cases.documents()))
    assert hidden.dtype == torch.bfloat16
    assert results == [torch.float32] * 4
    for operation in ("softplus", "exp", "sigmoid", "silu", "topk"):
        assert dtypes.seen.get(operation, {torch.float32}) == {torch.float32}, operation
    assert {"softplus", "exp", "sigmoid", "silu"} <= dtypes.seen.keys()
    assert torch.bfloat16 in dtypes.seen["mm"]  # the projections


def test_core_cannot_round_the_islands(tmp_path: Path) -> None:
    """A run with bfloat16 routers (`model.moe.router_dtype`) keeps those that the model fixes."""
    setup, _, _ = small(tmp_path)
    half = build(setup, "cpu", torch.bfloat16, router_dtype=torch.bfloat16)
    for module in setup.plugin.float32_modules(half):
        assert all(parameter.dtype == torch.float32 for parameter in module.parameters())
