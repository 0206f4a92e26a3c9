"""FP8 and FP4 block-quantised checkpoints load as plain weights, whole and in boxes."""

import pytest
import torch
from torch import Tensor, nn

from prime_rl.api.layout import Leaf, Scale, WeightLayout, fuse, rename
from prime_rl.errors import WeightError
from prime_rl.models.dequantise import dequantise, scale_region, stored_region, unpack_fp4
from prime_rl.models.load import copy_piece, load_named, load_weights
from prime_rl.testing.layout import RecordingSource

SCALED = Leaf("w.weight", scale=Scale("w.scale", ("w.weight_scale_inv",)))
LAYOUT = WeightLayout.of(rename("w", SCALED))


class One(nn.Module):
    """A module with the single weight `w`."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((rows, columns), 9.0))


def slow(stored: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Element by element: q * scale of the block it lies in."""
    result = stored.float().clone()
    for row in range(result.shape[0]):
        for column in range(0, result.shape[1], block[1]):
            stop = column + block[1]
            result[row, column:stop] *= scales[row // block[0], column // block[1]].float()
    return result


def fp8(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(("rows", "columns"), [(1000, 256), (576, 2048), (128, 128), (3, 130)])
def test_fp8_blocks_with_edges(rows: int, columns: int) -> None:
    """BL-085: partial blocks have scales of their own; 1000 rows have 8."""
    stored = fp8(rows, columns)
    grid = (-(-rows // 128), -(-columns // 128))
    scales = torch.arange(1.0, 1 + grid[0] * grid[1]).view(grid)
    module = One(rows, columns)
    load_named(module, LAYOUT, [("w.scale", scales), ("w.weight", stored)])
    assert module.w.equal(slow(stored, scales, (128, 128)))
    other = One(rows, columns)
    load_weights(other, LAYOUT, RecordingSource({"w.weight": stored, "w.weight_scale_inv": scales}))
    assert other.w.equal(module.w)


def test_row_126_of_1000_uses_scale_0() -> None:
    """A block of 125 rows, as 1000 / 8 suggests, would give it scale 1."""
    stored = torch.ones(1000, 128).to(torch.float8_e4m3fn)
    scales = torch.arange(8.0)[:, None]
    module = One(1000, 128)
    load_named(module, LAYOUT, [("w.weight", stored), ("w.scale", scales)])
    assert module.w[126, 0] == 0 and module.w[128, 0] == 1 and module.w[999, 0] == 7


def test_e8m0_scales_are_powers_of_two() -> None:
    """Byte 120 means 2^-7; converting the number 120 would be 2^14 times off."""
    stored = torch.ones(4, 4).to(torch.float8_e4m3fn)
    byte = torch.full((1, 1), 120, dtype=torch.uint8)
    for scales in (byte, byte.view(torch.float8_e8m0fnu)):
        module = One(4, 4)
        load_named(module, LAYOUT, [("w.weight", stored), ("w.scale", scales)])
        assert (module.w == 2.0**-7).all()


def test_fp4_table_and_order() -> None:
    """Low half first; bit 3 is the sign: byte 0x9B is (11 -> -1.5, 9 -> -0.5)."""
    packed = torch.tensor([[0x10, 0x32, 0x54, 0x76], [0x98, 0xBA, 0xDC, 0xFE]], dtype=torch.uint8)
    values = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert unpack_fp4(packed).equal(torch.stack([values, -values]))
    assert unpack_fp4(torch.tensor([[0x9B]], dtype=torch.uint8)).tolist() == [[-1.5, -0.5]]


def test_fp4_loads_with_scales_per_row_and_32_columns() -> None:
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(-128, 128, (6, 48), generator=generator, dtype=torch.int8)
    scales = torch.randint(120, 130, (6, 3), generator=generator, dtype=torch.uint8)
    module = One(6, 96)
    load_named(
        module,
        LAYOUT,
        [("w.weight", packed), ("w.scale", scales.view(torch.float8_e8m0fnu))],
    )
    assert module.w.equal(slow(unpack_fp4(packed), scales.view(torch.float8_e8m0fnu), (1, 32)))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_boxes(dtype: torch.dtype) -> None:
    """Any box of rows and columns equals the box of the whole, odd FP4 columns included."""
    block = (1, 32) if dtype == torch.int8 else (128, 128)
    stored = fp8(300, 256) if dtype != torch.int8 else fp8(300, 128).view(torch.int8)
    grid = (-(-300 // block[0]), -(-256 // block[1]))
    scales = torch.randint(118, 134, grid, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    full = dequantise(stored, scales, ((0, 300), (0, 256)), block)
    for region in (((127, 129), (0, 256)), ((5, 290), (33, 130)), ((299, 300), (255, 256))):
        boxes = (stored_region(region, dtype), scale_region(region, block))
        cut = [
            t[tuple(slice(start, stop) for start, stop in box)]
            for t, box in zip((stored, scales), boxes, strict=True)
        ]
        (row, row_end), (column, column_end) = region
        assert dequantise(*cut, region, block).equal(full[row:row_end, column:column_end])


def test_fused_parts_are_dequantised_apart() -> None:
    """gate FP8, up already plain: each piece by its own dtype, and by boxes."""
    layout = WeightLayout.of(
        fuse("w", [Leaf(f"{n}.weight", scale=Scale(f"{n}.scale")) for n in ("gate", "up")])
    )
    gate, up = fp8(130, 64), torch.randn(130, 64)
    scales = torch.tensor([[2.0], [4.0]])
    tensors = {"gate.weight": gate, "gate.scale": scales, "up.weight": up}
    module = One(260, 64)
    load_named(module, layout, tensors.items())
    expected = torch.cat([slow(gate, scales, (128, 128)), up])
    assert module.w.equal(expected)
    local = torch.zeros(100, 64)
    form = layout.entries["w"].source
    for piece in form.pieces((260, 64), ((70, 170), (0, 64)), local):
        copy_piece(piece, RecordingSource(tensors))
    assert local.equal(expected[70:170])


def test_missing_and_mis_shaped_scales_are_named() -> None:
    stored, scales = fp8(130, 64), torch.ones(2, 1)
    with pytest.raises(WeightError, match="w.scale is missing"):
        load_weights(One(130, 64), LAYOUT, RecordingSource({"w.weight": stored}))
    with pytest.raises(WeightError, match="did not come"):
        load_named(One(130, 64), LAYOUT, [("w.weight", stored)])
    wrong = {"w.weight": stored, "w.scale": scales[:1]}
    for load in (
        lambda: load_weights(One(130, 64), LAYOUT, RecordingSource(wrong)),
        lambda: load_named(One(130, 64), LAYOUT, wrong.items()),
    ):
        with pytest.raises(WeightError, match=r"w.scale has shape \[1, 1\], expected \[2, 1\]"):
            load()


def test_plain_weight_needs_no_scale_and_saving_writes_none() -> None:
    module = One(130, 64)
    plain = torch.randn(130, 64)
    load_named(module, LAYOUT, [("w.weight", plain)])
    assert module.w.equal(plain)
    assert [name for name, _ in LAYOUT.stream([("w", module.w)])] == ["w.weight"]


def test_one_number_for_several_tensors() -> None:
    """A table in parts with one scale for all: in any order, by boxes, as [] and as [1]."""
    scale = Scale("table.scale", block=None)
    layout = WeightLayout.of(
        fuse(
            "w",
            [Leaf(f"table.{part}", scale=scale) for part in range(3)],
            sizes=(5, 5, 2),
            alternatives=[Leaf("table", scale=scale)],
        )
    )
    assert layout.runtime_for("table.scale") == ("w",)
    parts = {f"table.{part}": fp8(rows, 6) for part, rows in enumerate((5, 5, 2))}
    expected = torch.cat([part.float() for part in parts.values()]) * 0.3
    for number in (torch.tensor(0.3), torch.tensor([0.3])):
        named = [*parts.items(), ("table.scale", number)]
        for order in (named, named[::-1], [named[1], named[3], named[0], named[2]]):
            module = One(12, 6)
            load_named(module, layout, order)
            assert module.w.equal(expected)
        module = One(12, 6)
        load_weights(module, layout, RecordingSource(dict(named)))
        assert module.w.equal(expected)
    in_one = torch.cat([part.view(torch.uint8) for part in parts.values()])
    named = [("table", in_one.view(torch.float8_e4m3fn)), ("table.scale", number)]
    for order in (named, named[::-1]):
        load_named(module := One(12, 6), layout, order)
        assert module.w.equal(expected)
    local = torch.zeros(6, 6)
    for piece in layout.entries["w"].source.pieces((12, 6), ((3, 9), (0, 6)), local):
        copy_piece(piece, RecordingSource({**parts, "table.scale": number}))
    assert local.equal(expected[3:9])
    with pytest.raises(WeightError, match="did not come"):
        load_named(One(12, 6), layout, parts.items())
    with pytest.raises(WeightError, match=r"table.scale has shape \[2\], expected \[1\]"):
        load_weights(One(12, 6), layout, RecordingSource({**parts, "table.scale": torch.ones(2)}))
    with pytest.raises(WeightError, match="twice"):
        WeightLayout.of(
            rename("a", Leaf("a", scale=Scale("s"))), rename("b", Leaf("b", scale=Scale("s")))
        )
