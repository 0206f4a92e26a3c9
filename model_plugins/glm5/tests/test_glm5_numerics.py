"""Quantised checkpoints, draft layers, and in which dtype what is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from prime_rl.api import PackedBatch
from prime_rl.errors import WeightError
from prime_rl.layers.dsa_torch import TorchDSA
from prime_rl.models.head import head_weight
from prime_rl.models.kept import kept_tensors
from prime_rl.models.load import load_named
from prime_rl.models.save import iter_checkpoint
from prime_rl.models.tensor_files import TensorFiles

WIDE = {
    "hidden_size": 160,
    "q_lora_rank": 256,
    "kv_lora_rank": 136,
    "intermediate_size": 200,
    "moe_intermediate_size": 144,
    "num_nextn_predict_layers": 1,
}
"""Sizes of several 128 x 128 blocks, whole and cut."""
UNQUANTISED = ("embed_tokens", "lm_head", "norm", "mlp.gate.", "weights_proj")


def quantised(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(FP8 numbers, block scales, what they stand for), block by block."""
    rows, columns = weight.shape
    numbers = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    meant = torch.empty_like(weight)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            box = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = weight[box].abs().max() / 448
            numbers[box] = (weight[box] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[box] = numbers[box].float() * scales[i, j]
    return numbers, scales, meant


def test_block_quantised_checkpoint(
    tiny: Any, make_theirs: Any, make_ours: Any, tmp_path: Path
) -> None:
    """From a file and as a stream, scales before and after their weights (BL-085)."""
    make_theirs({**tiny, **WIDE}).save_pretrained(tmp_path)
    stored: dict[str, Tensor] = {}
    expected = load_file(tmp_path / "model.safetensors")
    for name in list(expected):
        if any(part in name for part in UNQUANTISED):
            stored[name] = expected[name]
            continue
        numbers, scales, expected[name] = quantised(expected[name])
        stored[name], stored[name + "_scale_inv"] = numbers, scales
    kv_a = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"
    assert stored[kv_a].shape == (144, 160) and stored[kv_a + "_scale_inv"].shape == (2, 2)
    assert "model.layers.0.self_attn.indexer.wk.weight_scale_inv" in stored
    assert "model.layers.2.mlp.experts.7.down_proj.weight_scale_inv" in stored
    save_file(stored, tmp_path / "model.safetensors")
    setup, module = make_ours(tmp_path)
    for _ in range(2):
        found = dict(iter_checkpoint(module, setup.layout))
        assert found.keys() == expected.keys()
        assert all(found[name].equal(expected[name]) for name in expected)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        load_named(module, setup.layout, sorted(stored.items(), reverse=True))
    scale = stored.pop(kv_a + "_scale_inv")
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match="kv_a_proj_with_mqa.weight_scale_inv is missing"):
        make_ours(tmp_path)
    save_file({**stored, kv_a + "_scale_inv": scale[:1]}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"kv_a_proj_with_mqa.weight_scale_inv has shape \[1, 2"):
        make_ours(tmp_path)


def test_draft_layers_are_carried_along(
    tiny: Any, make_theirs: Any, make_ours: Any, tmp_path: Path
) -> None:
    """Tensors of the layer after the last are legal and copied; without the key they are not."""
    draft = {
        "model.layers.6.eh_proj.weight": torch.randn(64, 128),
        "model.layers.6.shared_head.norm.weight": torch.randn(64),
        "model.layers.6.self_attn.indexer.wk.weight": torch.randn(16, 64),
    }
    for drafts in (1, 0):
        make_theirs({**tiny, "num_nextn_predict_layers": drafts}).save_pretrained(tmp_path)
        original = load_file(tmp_path / "model.safetensors")
        save_file({**original, **draft}, tmp_path / "model.safetensors")
        if drafts:
            setup, module = make_ours(tmp_path)
            kept = dict(kept_tensors(setup.layout, TensorFiles(tmp_path)))
            assert kept.keys() == draft.keys()
            assert all(kept[name].equal(draft[name]) for name in draft)
            assert dict(iter_checkpoint(module, setup.layout)).keys() == original.keys()
        else:
            with pytest.raises(WeightError, match=r"model\.layers\.6\."):
                make_ours(tmp_path)


def test_what_stays_float32(
    checkpoint: Path, make_ours: Any, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a bfloat16 module: routers, and everything the indexer does after its projections."""
    setup, module = make_ours(checkpoint, torch.bfloat16)
    islands = {id(p) for part in setup.plugin.float32_modules(module) for p in part.parameters()}
    assert len(islands) == 4
    for name, parameter in module.named_parameters():
        expected = torch.float32 if id(parameter) in islands else torch.bfloat16
        assert parameter.dtype == expected, name
    assert all(buffer.dtype == torch.float32 for buffer in module.buffers())
    routed, chosen, attended = [], [], []
    for part in setup.plugin.float32_modules(module):
        part.register_forward_hook(lambda _, x, out: routed.append((x[0].dtype, out[1].dtype)))
    select, attend = TorchDSA.select, TorchDSA.attend

    def recorded_select(self: Any, *tensors: Any) -> Tensor:
        chosen.append(tuple(tensor.dtype for tensor in tensors[:3]))
        return select(self, *tensors)

    def recorded_attend(self: Any, *tensors: Any, **settings: Any) -> Tensor:
        attended.append(tuple(tensor.dtype for tensor in tensors[:2]))
        return attend(self, *tensors, **settings)

    monkeypatch.setattr(TorchDSA, "select", recorded_select)
    monkeypatch.setattr(TorchDSA, "attend", recorded_attend)
    hidden = module(PackedBatch.from_documents(documents))
    assert routed == [(torch.bfloat16, torch.float32)] * 4
    assert chosen == [(torch.float32,) * 3] * 3
    assert attended == [(torch.bfloat16,) * 2] * 6
    assert hidden.dtype == torch.bfloat16


def test_router_keeps_weights_that_bfloat16_cannot_hold(checkpoint: Path, make_ours: Any) -> None:
    _, module = make_ours(checkpoint, torch.bfloat16)
    original = load_file(checkpoint / "model.safetensors")
    for kind, runtime in (("weight", "weight"), ("e_score_correction_bias", "selection_bias")):
        stored = original[f"model.layers.3.mlp.gate.{kind}"]
        assert getattr(module.layers[3].mlp.router, runtime).equal(stored)
        assert not stored.bfloat16().float().equal(stored)


def test_norms_round_once(checkpoint: Path, make_ours: Any) -> None:
    """The weight multiplies in float32, as the server does. Rounding the normalised value first
    changes a third of the numbers by a bit; one rounding differs from the exact one in ties."""
    _, module = make_ours(checkpoint, torch.bfloat16)
    x_TH = torch.randn(50, 64, generator=torch.Generator().manual_seed(5)).bfloat16()
    attention = module.layers[0].attention
    norms = (module.norm, module.layers[0].input_norm, module.layers[0].mlp_norm)
    for norm in (*norms, attention.query_norm, attention.latent_norm):
        x = x_TH[:, : len(norm.weight)]
        exact = x.double() * (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        expected = (exact * norm.weight.double()).bfloat16()
        twice = exact.bfloat16() * norm.weight
        assert (norm(x) != expected).float().mean() < 1e-3
        assert (twice != expected).float().mean() > 0.2


def test_bfloat16_forward_is_near_float32(
    checkpoint: Path, make_ours: Any, documents: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """8 bits of mantissa through six layers: within 5 % of the largest logit. Keys and experts
    are those of the float32 model, since one that changes moves a logit as far as it likes."""
    from dataclasses import replace

    from prime_rl.layers.routing import recording

    batch = PackedBatch.from_documents(documents)
    select = TorchDSA.select
    rows: list[Tensor] = []

    def keep(self: Any, *tensors: Any) -> Tensor:
        rows.append(select(self, *tensors))
        return rows[-1]

    _, module = make_ours(checkpoint)
    _, small = make_ours(checkpoint, torch.bfloat16)
    monkeypatch.setattr(TorchDSA, "select", keep)
    with torch.no_grad(), recording() as record:
        expected = module(batch) @ head_weight(module).T
    again = iter(rows[:3])
    monkeypatch.setattr(TorchDSA, "select", lambda self, *tensors: next(again))
    routes = record.stacked(6)
    with torch.no_grad():
        hidden = small(replace(batch, routed_experts=routes))
        found = (hidden @ head_weight(small).T).float()
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= 0.05
