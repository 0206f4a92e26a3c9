"""Checkpoints: released and transformers' names, FP8 and FP4, exports, wrong files by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_v4_oracle import (
    by_their_names,
    directory_of,
    documents,
    logits_of_ours,
    logits_of_theirs,
    ours,
    setup_of,
    theirs,
)
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from prime_rl.errors import WeightError
from prime_rl.models.kept import kept_tensors
from prime_rl.models.load import load_named, load_weights, runtime_tensors
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.setup import ModelSetup, build
from prime_rl.models.tensor_files import TensorFiles

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
WIDE = {
    "hidden_size": 160,
    "num_hidden_layers": 3,
    "layer_types": [
        "compressed_sparse_attention",
        "heavily_compressed_attention",
        "sliding_attention",
    ],
    "mlp_layer_types": ["hash_moe", "moe", "moe"],
    "q_lora_rank": 136,
    "moe_intermediate_size": 64,
    "n_routed_experts": 8,
}
"""Sizes that cut a block of 128 at the edge."""


@pytest.fixture(scope="module")
def oracle() -> nn.Module:
    return theirs()


def released(setup: ModelSetup, module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in iter_checkpoint(module, setup.layout)}


def assert_same_runtime(module: nn.Module, other: nn.Module) -> None:
    expected = runtime_tensors(other)
    for name, tensor in runtime_tensors(module).items():
        assert tensor.equal(expected[name]), name


def test_names_of_transformers_and_of_the_release_load(oracle: nn.Module, tmp_path: Path) -> None:
    """172 tensors there, 304 here; from files of either kind the same bits."""
    setup, module = ours(oracle, tmp_path)
    state = {name: tensor.clone() for name, tensor in oracle.state_dict().items()}
    own = released(setup, module)
    assert (len(state), len(own)) == (172, 304)
    assert not any(name.startswith("model.") for name in own)
    tensors = {name: t.detach() for name, t in runtime_tensors(module).items()}
    assert {k: tuple(t.shape) for k, t in by_their_names(setup, tensors).items()} == {
        k: tuple(t.shape) for k, t in state.items()
    }
    for number, tensors in enumerate((state, own)):
        path = directory_of(oracle, tmp_path / str(number))
        save_file(tensors, path / "model.safetensors")
        again = build(setup)
        load_weights(again, setup.layout, path)
        assert_same_runtime(again, module)
    for name, (first, second) in {
        "layers.1.attention.latent.weight": ("q_a_proj", "kv_proj"),
        "layers.1.attention.compressor.project.weight": (
            "compressor.kv_proj",
            "compressor.gate_proj",
        ),
    }.items():
        parts = [state[f"model.layers.1.self_attn.{part}.weight"] for part in (first, second)]
        assert runtime_tensors(module)[name].equal(torch.cat(parts))


def test_our_export_is_theirs(oracle: nn.Module, tmp_path: Path) -> None:
    """transformers loads the released names to the same bits and logits; what servers need is in
    config.json, and reading it back gives the same model."""
    setup, module = ours(oracle, tmp_path / "read")
    tensors = iter_checkpoint(module, setup.layout)
    save_checkpoint(tmp_path / "ours", tensors, setup.export_config(), shard_bytes=100_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(report.values()), report
    expected = oracle.state_dict()
    assert again.state_dict().keys() == expected.keys()
    for name, tensor in again.state_dict().items():
        assert tensor.equal(expected[name]), name
    texts = documents()
    with torch.no_grad():
        assert logits_of_theirs(again, texts).equal(logits_of_theirs(oracle, texts))
    config = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert config["architectures"] == ["DeepseekV4ForCausalLM"]
    assert config["compress_ratios"] == [0, 4, 16, 4, 0, 16, 0]  # the last one is a draft layer's
    assert config["num_hash_layers"] == 2 and config["qk_rope_head_dim"] == 8
    assert config["rope_scaling"]["type"] == "yarn" and config["rope_scaling"]["factor"] == 16
    assert setup_of(tmp_path / "ours").architecture == setup.architecture


def test_bfloat16_export_keeps_float32_where_releases_do(oracle: nn.Module, tmp_path: Path) -> None:
    setup, module = ours(oracle, tmp_path)
    written = dict(iter_checkpoint(module, setup.layout, torch.bfloat16))
    exact = ("_fn", "_base", "_scale", "attn_sink", ".ape", "gate.bias")
    for name, tensor in written.items():
        if name.endswith("tid2eid"):
            assert tensor.dtype == torch.int64
        else:
            dtype = torch.float32 if name.endswith(exact) else torch.bfloat16
            assert tensor.dtype == dtype, name


def quantised_fp8(tensor: Tensor, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """(stored, scales, what it stands for), block by block."""
    rows, columns = (-(-size // 128) for size in tensor.shape)
    stored = torch.empty(tensor.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty(rows, columns)
    meant = torch.empty_like(tensor)
    for r in range(rows):
        for c in range(columns):
            box = (slice(128 * r, 128 * r + 128), slice(128 * c, 128 * c + 128))
            scale = tensor[box].abs().max() / 448
            if scale_dtype == torch.float8_e8m0fnu:
                scale = torch.exp2(torch.ceil(torch.log2(scale)))
            stored[box] = (tensor[box] / scale).to(torch.float8_e4m3fn)
            scales[r, c] = scale
            meant[box] = stored[box].float() * scale
    return stored, scales.to(scale_dtype), meant


def quantised_fp4(tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Two numbers a byte, the even column low; one power of two for 32 columns of a row."""
    groups = tensor.unflatten(1, (-1, 32))
    scales = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1) / 6)))
    table = torch.tensor(E2M1)
    nearest = ((groups / scales[..., None]).abs()[..., None] - table).abs().argmin(-1)
    meant = table[nearest] * groups.sign() * scales[..., None]
    codes = (nearest + 8 * (groups < 0)).flatten(1)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8).view(torch.int8)
    return packed, scales.to(torch.float8_e8m0fnu), meant.flatten(1)


def quantise(
    tensors: dict[str, Tensor], experts: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A release of these tensors, and what they mean."""
    power = torch.float8_e8m0fnu if experts == "fp4" else torch.float32
    ends = (".wq_a", ".wq_b", ".wkv", ".wo_a", ".wo_b", ".w1", ".w2", ".w3")
    stored, meant = {}, {}
    for name, tensor in tensors.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith(ends) or "compressor." in name:
            stored[name] = meant[name] = tensor
        elif experts == "fp4" and ".experts." in name:
            stored[name], stored[f"{stem}.scale"], meant[name] = quantised_fp4(tensor)
        else:
            stored[name], stored[f"{stem}.scale"], meant[name] = quantised_fp8(tensor, power)
    return stored, meant


@pytest.mark.parametrize("experts", ["fp4", "fp8"])
def test_quantised_release(experts: str, tmp_path: Path) -> None:
    """FP8 in blocks of 128 with scales that are powers of two, experts in FP4 (Flash), or all FP8
    with float32 scales (Flash-Base); draft layers are kept as they are."""
    setup, module = ours(theirs(**WIDE), tmp_path)
    stored, meant = quantise(released(setup, module), experts)
    assert sum(name.endswith(".scale") for name in stored) == 3 * (5 + 3 * 9) + 1
    draft = {"mtp.0.e_proj.weight": torch.ones(2, 2).to(torch.float8_e4m3fn)}
    save_file({**stored, **draft}, tmp_path / "model.safetensors")
    again = build(setup)
    load_weights(again, setup.layout, tmp_path)
    for name, tensor in released(setup, again).items():
        assert tensor.equal(meant[name]), name
    load_named(module, setup.layout, reversed(stored.items()))
    assert_same_runtime(module, again)
    kept = dict(kept_tensors(setup.layout, TensorFiles(tmp_path)))
    assert kept.keys() == draft.keys()
    assert logits_of_ours(again, documents((9,))).isfinite().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("layers.0.attn.wq_b.scale"), "layers.0.attn.wq_b.scale"),
        (lambda t: t.pop("layers.1.ffn.experts.3.w2.weight"), "layers.1.ffn.experts.3.w2.weight"),
        (lambda t: t.pop("layers.0.ffn.gate.tid2eid"), "layers.0.ffn.gate.tid2eid"),
        (lambda t: t.update({"layers.0.ffn.gate.bias": torch.zeros(8)}), "layers.0.ffn.gate.bias"),
        (lambda t: t.update({"layers.0.attn.norm.weight": torch.zeros(8)}), "layers.0.attn.norm"),
        (
            lambda t: t.update({"layers.2.attn.wo_a.weight": torch.zeros(32, 63)}),
            "layers.2.attn.wo_a.weight",
        ),
        (
            lambda t: t.update({"layers.1.ffn.experts.3.w2.scale": torch.zeros(160, 3)}),
            "layers.1.ffn.experts.3.w2.scale",
        ),
    ],
)
def test_wrong_releases_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    setup, module = ours(theirs(**WIDE), tmp_path)
    stored, _ = quantise(released(setup, module), "fp4")
    change(stored)
    save_file(stored, tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors").keys() == stored.keys()
    with pytest.raises(WeightError, match=message):
        load_weights(build(setup), setup.layout, tmp_path)
