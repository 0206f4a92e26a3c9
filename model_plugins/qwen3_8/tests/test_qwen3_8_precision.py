"""bfloat16: how far from float32, and what stays float32."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import qwen3_8_cases as cases
import torch
from prime_rl_model_qwen3_8.delta_net import Decay
from torch.utils._python_dispatch import TorchDispatchMode

from prime_rl.api import PackedBatch
from prime_rl.layers.routing import recording
from prime_rl.models.load import load_weights
from prime_rl.models.setup import ModelSetup, build
from prime_rl.testing.layout import saved


def small(directory: Path, **changes: Any) -> tuple[ModelSetup, torch.nn.Module, torch.nn.Module]:
    """The same weights in float32 and in bfloat16."""
    cases.theirs(**changes).save_pretrained(directory)
    setup, module = cases.ours(directory)
    half = build(setup, dtype=torch.bfloat16)
    load_weights(half, setup.layout, directory)
    return setup, module, half


@pytest.mark.parametrize(("layers", "limit"), [([], 0.05), ([2], 0.1)])
def test_bfloat16_forward_is_near_float32(layers: list[int], limit: float, tmp_path: Path) -> None:
    """8 bits of mantissa through five layers: 5 % of the norm of the hidden states without an n-gram
    table (seen: 3.4 %, as transformers in bfloat16) and 10 % with one (6.8 %, transformers 6.6 %),
    whose gate sign(s) sqrt|s| is steep. Every token reads all that stands before it, and experts
    are those that float32 chose: another choice is no rounding error any more."""
    _, module, half = small(tmp_path, ple_layer_ids=layers)
    batch = PackedBatch.from_documents([text[:11] for text in cases.documents()])
    with torch.no_grad(), recording() as record:
        expected = module(batch)
        routes = record.stacked(5)
        found = half(replace(batch, routed_experts=routes)).float()
    assert (found - expected).norm() <= limit * expected.norm()


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
    assert [type(module) for module in islands] == [Decay] * 4
    exact = {id(tensor) for module in islands for tensor in module.parameters()}
    for name, parameter in half.named_parameters():
        expected = torch.float32 if id(parameter) in exact else torch.bfloat16
        assert parameter.dtype == expected, name
    results: list[torch.dtype] = []
    for module in islands:
        module.register_forward_hook(lambda _, inputs, output: results.append(output.dtype))
    rules: list[set[torch.dtype]] = []
    for block in half.layers:
        if block.delta is not None:
            original = block.delta.rule

            def recorded(*inputs, original=original):  # type: ignore[no-untyped-def]
                with Dtypes() as inner:
                    out = original(*inputs)
                rules.append(set.union(*inner.seen.values()) - {torch.bool, torch.int64})
                return out

            block.delta.rule = recorded
    with torch.no_grad(), Dtypes() as dtypes:
        hidden = half(PackedBatch.from_documents(cases.documents()))
    assert hidden.dtype == torch.bfloat16
    assert results == [torch.float32] * 4
    assert rules == [{torch.float32}] * 4  # the state and all products with it
    for operation in ("exp", "softplus", "rsqrt", "topk", "_softmax"):
        seen = dtypes.seen.get(operation, {torch.float32}) - {torch.int64}
        assert seen == {torch.float32}, f"{operation}: {seen}"
    assert {"exp", "softplus", "_softmax"} <= dtypes.seen.keys()
    assert torch.bfloat16 in dtypes.seen["mm"]  # the projections


def test_decay_is_written_in_float32(tmp_path: Path) -> None:
    """Whatever the dtype of an export, and its constants stay integers."""
    setup, module, _ = small(tmp_path)
    exported = dict(setup.layout.stream(module.state_dict().items(), torch.bfloat16))
    for name, tensor in exported.items():
        if name.endswith(("A_log", "dt_bias")):
            assert tensor.dtype == torch.float32, name
        elif name.endswith(("multipliers", "sizes", "offsets")):
            assert tensor.dtype == torch.int64, name
        else:
            assert tensor.dtype == torch.bfloat16, name
    whole = saved(module, setup.layout)
    assert exported.keys() == whole.keys()


def test_index_scores_are_not_rounded(tmp_path: Path) -> None:
    """Queries and keys are bfloat16, their products are not: the same rows as with float32
    arithmetic on the same rounded numbers."""
    _, _, half = small(tmp_path)
    attention = half.layers[3].attention
    batch = PackedBatch.from_documents(cases.documents())
    seen: list[tuple[torch.Tensor, ...]] = []
    select = attention.sparse.select

    def recorded(*inputs):  # type: ignore[no-untyped-def]
        rows = select(*inputs)
        exact = select(*(x.float() if x.is_floating_point() else x for x in inputs[:5]), inputs[5])
        seen.append((inputs[0], inputs[1], rows, exact))
        return rows

    attention.indexer.backend = type("Recorded", (), {"select": staticmethod(recorded)})
    with torch.no_grad():
        half(batch)
    ((queries, keys, rows, exact),) = seen
    assert queries.dtype == keys.dtype == torch.bfloat16
    assert rows.sort(1).values.equal(exact.sort(1).values)
