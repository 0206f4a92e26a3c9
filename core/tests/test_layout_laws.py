"""The weight layout: every rule by hand, both directions, in boxes, and what is refused."""

import random

import pytest
import torch
from torch import Tensor, nn

from prime_rl.api.layout import (
    Cat,
    Entry,
    Leaf,
    Stack,
    WeightLayout,
    fuse,
    ignore,
    rename,
    split,
    stack_experts,
    tie,
    whole,
)
from prime_rl.errors import WeightError
from prime_rl.models.load import copy_piece, load_named, load_weights, runtime_tensors
from prime_rl.testing import layout as laws


class Holder(nn.Module):
    """Runtime tensors under given names; integer ones become buffers."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                self.register_parameter(name, nn.Parameter(tensor.clone()))
            else:
                self.register_buffer(name, tensor.clone())


LAYOUT = WeightLayout.of(
    rename("embed", "model.embed.weight"),
    rename("conv_{i}", "model.{i}.conv1d.weight", squeeze=1, i=range(2)),
    rename("turned", "model.turned", permute=(2, 0, 1)),
    fuse("qkv_{i}", [f"model.{{i}}.{name}.weight" for name in "qkv"], sizes=(6, 2, 2), i=range(2)),
    fuse("wide", ["model.left", "model.right"], dim=1),
    stack_experts("gate_up", ["model.x.{e}.gate.weight", "model.x.{e}.up.weight"], range(3)),
    stack_experts(
        "down",
        ["model.x.{e}.down.weight"],
        range(3),
        alternatives=[Leaf("model.x.down_proj", ("model.x.down_proj.weight",))],
    ),
    split("model.mixed.weight", {"query": 4, "gate": 3}),
    rename("counts", Leaf("model.counts", dtype="int64")),
    rename("scalar", Leaf("model.scalar", dtype="float32")),
    tie("lm_head.weight"),
    ignore("model.*.inv_freq", "computed"),
    ignore("mtp.*", "draft layers", keep=True),
)


def runtime(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return {
        "embed": drawn(7, 4),
        "conv_0": drawn(5, 4),
        "conv_1": drawn(5, 4),
        "turned": drawn(4, 2, 3),
        "qkv_0": drawn(10, 4),
        "qkv_1": drawn(10, 4),
        "wide": drawn(3, 8),
        "gate_up": drawn(3, 6, 4),
        "down": drawn(3, 4, 3),
        "query": drawn(4, 5),
        "gate": drawn(3, 5),
        "counts": torch.randint(9, (6,), generator=generator),
        "scalar": drawn(),
    }


def test_every_rule_by_hand() -> None:
    """Expected checkpoint tensors written with plain slicing."""
    tensors = runtime()
    saved = dict(LAYOUT.stream(tensors.items()))
    expected = {
        "model.embed.weight": tensors["embed"],
        "model.0.conv1d.weight": tensors["conv_0"][:, None],
        "model.1.conv1d.weight": tensors["conv_1"][:, None],
        "model.turned": torch.stack([tensors["turned"][k] for k in range(4)], dim=-1),
        "model.left": tensors["wide"][:, :4],
        "model.right": tensors["wide"][:, 4:],
        "model.mixed.weight": torch.cat([tensors["query"], tensors["gate"]]),
        "model.counts": tensors["counts"],
        "model.scalar": tensors["scalar"],
    }
    for i in range(2):
        expected[f"model.{i}.q.weight"] = tensors[f"qkv_{i}"][:6]
        expected[f"model.{i}.k.weight"] = tensors[f"qkv_{i}"][6:8]
        expected[f"model.{i}.v.weight"] = tensors[f"qkv_{i}"][8:]
    for e in range(3):
        expected[f"model.x.{e}.gate.weight"] = tensors["gate_up"][e, :3]
        expected[f"model.x.{e}.up.weight"] = tensors["gate_up"][e, 3:]
        expected[f"model.x.{e}.down.weight"] = tensors["down"][e]
    assert saved.keys() == expected.keys()
    for name, tensor in expected.items():
        assert saved[name].equal(tensor), name


@pytest.mark.parametrize("seed", range(5))
def test_round_trip(seed: int) -> None:
    module, other = Holder(runtime(seed)), Holder(runtime(seed + 100))
    laws.assert_round_trip(module, other, LAYOUT)


def test_wrong_sets_are_refused() -> None:
    module, other = Holder(runtime()), Holder(runtime(1))
    laws.assert_wrong_checkpoints_fail(module, other, LAYOUT, samples=99)


def test_any_box_loads_and_reads_only_itself() -> None:
    """Random boxes of every runtime tensor equal the box of the whole; nothing else is read."""
    module = Holder(runtime())
    checkpoint = laws.saved(module, LAYOUT)
    forms = LAYOUT.choose(checkpoint)
    rng = random.Random(0)
    for name, tensor in runtime_tensors(module).items():
        for _ in range(20):
            region = []
            for size in tensor.shape:
                start = rng.randrange(size)
                region.append((start, rng.randrange(start, size) + 1))
            expected = tensor[tuple(slice(start, stop) for start, stop in region)].detach()
            local = torch.full_like(expected, 77)
            source = laws.RecordingSource(checkpoint)
            for piece in forms[name].pieces(tuple(tensor.shape), tuple(region), local):
                copy_piece(piece, source)
            assert local.equal(expected), (name, region)
            assert source.numbers_read == expected.numel(), (name, region)


def test_uneven_and_empty_boxes() -> None:
    """A rank without rows gets no pieces from a fusion."""
    form = LAYOUT.entries["qkv_0"].source
    assert list(form.pieces((10, 4), ((10, 10), (0, 4)), None)) == []
    names = [piece.leaf.name for piece in form.pieces((10, 4), ((5, 8), (0, 4)), None)]
    assert names == ["model.0.q.weight", "model.0.k.weight"]


def test_alternative_forms_load_and_the_first_is_written() -> None:
    """BL-082: stacked experts with and without `.weight`, in files and in streams."""
    module = Holder(runtime())
    checkpoint = laws.saved(module, LAYOUT)
    per_expert = [checkpoint.pop(f"model.x.{e}.down.weight") for e in range(3)]
    for name in ("model.x.down_proj", "model.x.down_proj.weight"):
        other = Holder(runtime(1))
        given = {**checkpoint, name: torch.stack(per_expert)}
        load_named(other, LAYOUT, reversed(given.items()))
        assert other.down.equal(module.down)
        other = Holder(runtime(1))
        load_weights(other, LAYOUT, laws.RecordingSource(given))
        assert other.down.equal(module.down)
        assert "model.x.1.down.weight" in laws.saved(other, LAYOUT)


@pytest.mark.parametrize("name", ["model.x.down_proj.weight0", "model.x.down_proj.bias"])
def test_no_expert_name_falls_through(name: str) -> None:
    module = Holder(runtime())
    given = {**laws.saved(module, LAYOUT), name: torch.zeros(3, 4, 3)}
    with pytest.raises(WeightError, match=name):
        load_named(module, LAYOUT, given.items())
    with pytest.raises(WeightError, match="near: model.x.down_proj"):
        LAYOUT.runtime_for(name)


def test_two_forms_of_one_tensor_are_refused() -> None:
    module = Holder(runtime())
    given = {**laws.saved(module, LAYOUT), "model.x.down_proj": torch.zeros(3, 4, 3)}
    for load in (
        lambda: load_named(module, LAYOUT, given.items()),
        lambda: load_weights(module, LAYOUT, laws.RecordingSource(given)),
    ):
        with pytest.raises(WeightError, match="model.x.down_proj"):
            load()


def test_a_tensor_that_comes_twice_is_refused() -> None:
    module = Holder(runtime())
    given = list(laws.saved(module, LAYOUT).items())
    with pytest.raises(WeightError, match="model.embed.weight came twice"):
        load_named(module, LAYOUT, [*given, given[0]])


def test_ignored_names_are_legal_everywhere() -> None:
    module, other = Holder(runtime()), Holder(runtime(1))
    given = laws.saved(module, LAYOUT)
    for name in ("lm_head.weight", "model.0.inv_freq", "mtp.0.norm.weight"):
        given[name] = torch.zeros(2)
        assert LAYOUT.runtime_for(name) == ()
    load_named(other, LAYOUT, given.items())
    load_weights(other, LAYOUT, laws.RecordingSource(given))
    assert other.embed.equal(module.embed)
    assert LAYOUT.is_kept("mtp.0.norm.weight") and not LAYOUT.is_kept("lm_head.weight")


def test_dtypes() -> None:
    """Loading converts to the runtime dtype; saving to the asked one, fixed dtypes apart."""
    module = Holder(runtime())
    given = {name: t.double() if t.is_floating_point() else t.int() for name, t in
             laws.saved(module, LAYOUT).items()}  # fmt: skip
    other = Holder(runtime(1))
    load_named(other, LAYOUT, given.items())
    assert other.embed.dtype == torch.float32 and other.embed.equal(module.embed)
    assert other.counts.dtype == torch.int64 and other.counts.equal(module.counts)
    saved = dict(LAYOUT.stream(runtime_tensors(module).items(), torch.bfloat16))
    assert saved["model.embed.weight"].dtype == torch.bfloat16
    assert saved["model.mixed.weight"].dtype == torch.bfloat16
    assert saved["model.scalar"].dtype == torch.float32
    assert saved["model.counts"].dtype == torch.int64


def test_one_runtime_tensor_at_a_time() -> None:
    tensors = runtime()
    names = [name for name, _ in LAYOUT.to_checkpoint("qkv_0", tensors["qkv_0"])]
    assert names == ["model.0.q.weight", "model.0.k.weight", "model.0.v.weight"]
    with pytest.raises(WeightError, match="model.mixed.weight was given in part only"):
        list(LAYOUT.to_checkpoint("query", tensors["query"]))
    with pytest.raises(WeightError, match="qvk_0"):
        list(LAYOUT.to_checkpoint("qvk_0", tensors["qkv_0"]))


def test_views_not_copies() -> None:
    """Streaming a large model must not double it."""
    tensors = runtime()
    for name in ("qkv_0", "gate_up", "turned", "conv_0"):
        start = tensors[name].untyped_storage().data_ptr()
        for _, view in LAYOUT.to_checkpoint(name, tensors[name]):
            assert view.untyped_storage().data_ptr() == start


def test_sizes_that_do_not_add_up_name_the_tensor() -> None:
    wrong = fuse("qkv", ["q", "k", "v"], sizes=(6, 2, 3))
    with pytest.raises(WeightError, match="q, k, v: parts of sizes"):
        WeightLayout.of(wrong).table({"qkv": (10, 4)})
    odd = fuse("gate_up", ["gate", "up"])
    with pytest.raises(WeightError, match="gate, up"):
        WeightLayout.of(odd).table({"gate_up": (7, 4)})
    experts = stack_experts("x", ["x.{e}"], range(3))
    with pytest.raises(WeightError, match="x.0"):
        WeightLayout.of(experts).table({"x": (4, 2)})


def test_a_layout_claims_every_name_once() -> None:
    with pytest.raises(WeightError, match="produces runtime tensor a twice"):
        WeightLayout.of(rename("a", "x"), rename("a", "y"))
    with pytest.raises(WeightError, match="claims x twice: for a and for b"):
        WeightLayout.of(rename("a", "x"), rename("b", "x"))
    with pytest.raises(WeightError, match="claims x twice"):
        WeightLayout.of(rename("a", ["y", "x"]), rename("b", "x"))
    with pytest.raises(WeightError, match="claims x twice"):
        WeightLayout.of([Entry("a", Cat((Leaf("x"), Leaf("x"))))])
    with pytest.raises(WeightError, match="claims x twice"):
        WeightLayout.of([Entry("a", Leaf("x"), (Stack((Leaf("x"),)),))])


def test_module_and_layout_must_agree() -> None:
    """BL-077: on either side, with near matches."""
    tensors = runtime()
    tensors["embedd"] = tensors.pop("embed")
    module = Holder(tensors)
    with pytest.raises(WeightError, match="embedd is not in the layout; near: embed"):
        load_named(module, LAYOUT, [])
    del module.embedd
    with pytest.raises(WeightError, match="produces embed, which the module does not have"):
        load_named(module, LAYOUT, [])


def test_table_lists_what_is_saved() -> None:
    tensors = runtime()
    rows = {row.name: row for row in LAYOUT.table({k: tuple(t.shape) for k, t in tensors.items()})}
    saved = dict(LAYOUT.stream(tensors.items()))
    assert {name: row.shape for name, row in rows.items()} == {
        name: tuple(tensor.shape) for name, tensor in saved.items()
    }
    assert rows["model.mixed.weight"].runtimes == ("query", "gate")
    assert rows["model.counts"].dtype == "int64" and rows["model.left"].dtype is None


def test_nothing_is_written_when_a_checkpoint_is_wrong() -> None:
    module, other = Holder(runtime()), Holder(runtime(1))
    given = laws.saved(module, LAYOUT)
    given["model.scalar"] = torch.zeros(3)
    before = {name: t.detach().clone() for name, t in runtime_tensors(other).items()}
    with pytest.raises(WeightError, match=r"model.scalar has shape \[3\], expected \[\]"):
        load_weights(other, LAYOUT, laws.RecordingSource(given))
    for name, tensor in runtime_tensors(other).items():
        assert tensor.equal(before[name]), name


def test_whole_region() -> None:
    assert whole((2, 3)) == ((0, 2), (0, 3)) and whole(()) == ()
