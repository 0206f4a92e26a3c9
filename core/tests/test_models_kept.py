"""Tensors that exports carry along: as they are, or without their quantisation."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from prime_rl.api.layout import WeightLayout, ignore, rename
from prime_rl.models.kept import kept_tensors, scale_of
from prime_rl.models.tensor_files import TensorFiles

LAYOUT = WeightLayout.of(
    rename("embed", "embed.weight"),
    ignore("mtp.*", "draft layers", keep=True),
    ignore("vision.*", "not used"),
)


def kept(folder: Path, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    named = {name.replace("_", ".", 1): tensor for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return dict(kept_tensors(LAYOUT, TensorFiles(folder), torch.float32))


def test_plain_tensors_pass_as_they_are(tmp_path):
    odd = torch.arange(6, dtype=torch.int32).view(2, 3)
    found = kept(tmp_path, embed_weight=torch.ones(2, 2), mtp_norm=odd, vision_x=torch.ones(1))
    assert list(found) == ["mtp.norm"] and found["mtp.norm"].equal(odd)


def test_blocks_are_dequantised_and_their_scales_left_out(tmp_path):
    """130 rows of 128 columns: two blocks, the second of two rows."""
    weight = torch.full((130, 128), 2.0).to(torch.float8_e4m3fn)
    found = kept(tmp_path, mtp_weight=weight, mtp_weight_scale_inv=torch.tensor([[3.0], [0.5]]))
    assert list(found) == ["mtp.weight"]
    assert (found["mtp.weight"][:128] == 6).all() and (found["mtp.weight"][128:] == 1).all()


def test_packed_fp4_and_single_scales(tmp_path):
    """Byte 0x42 holds 1.0 in the even column and 2.0 in the odd one."""
    packed = torch.full((1, 16), 0x42, dtype=torch.int8)
    scale = torch.tensor([[128]], dtype=torch.uint8).view(torch.float8_e8m0fnu)
    found = kept(tmp_path, **{"mtp_a.weight": packed, "mtp_a.scale": scale})
    assert found["mtp.a.weight"].tolist() == [[2.0, 4.0] * 16]
    one = torch.full((3, 2), 4.0).to(torch.float8_e4m3fn)
    found = kept(tmp_path, mtp_weight=one, mtp_weight_scale=torch.tensor(0.25))
    assert list(found) == ["mtp.weight"] and (found["mtp.weight"] == 1).all()


@pytest.mark.parametrize("scale", ["a.weight_scale_inv", "a.weight_scale", "a.scale"])
def test_scales_are_found_by_name(scale):
    assert scale_of("a.weight", ["b.scale", scale]) == scale
    assert scale_of("b.weight", [scale]) is None
