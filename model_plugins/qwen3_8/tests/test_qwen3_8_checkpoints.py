"""Checkpoints of Qwen3.8: names, FP8, what is only kept, config.json, wrong tensors."""

import json
from pathlib import Path
from typing import Any

import pytest
import qwen3_8_cases as cases
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.api import PackedBatch
from prime_rl.errors import WeightError
from prime_rl.models.kept import kept_tensors
from prime_rl.models.load import load_named
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.tensor_files import TensorFiles
from prime_rl.testing.layout import saved

OUTER = {
    "architectures": ["Qwen4ExpForConditionalGeneration"],
    "model_type": "qwen4_exp",
    "image_token_id": 120,
    "split_ngram_parts": 512,
    "vision_config": {"depth": 1},
}
RELEASED, THEIRS = "model.language_model.", "model."


def write_checkpoint(
    directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({k: v.contiguous() for k, v in tensors.items()}, directory / "model.safetensors")


def apart(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Fused experts as one tensor per expert and matrix: gate rows first."""
    out = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        for expert, own in enumerate(tensor if stem.endswith(".experts") else ()):
            if kind == "down_proj":
                out[f"{stem}.{expert}.down_proj.weight"] = own
            else:
                half = own.shape[0] // 2
                out[f"{stem}.{expert}.gate_proj.weight"] = own[:half].clone()
                out[f"{stem}.{expert}.up_proj.weight"] = own[half:].clone()
        if not stem.endswith(".experts"):
            out[name] = tensor
    return out


def in_one_table(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The n-gram table in one piece, as transformers has it at run time."""
    out = {name: tensor for name, tensor in tensors.items() if ".shard_" not in name}
    for name, tensor in tensors.items():
        if ".shard_" in name:
            whole = name.split("shard_")[0] + "weight"
            out[whole] = torch.cat([out[whole], tensor]) if whole in out else tensor
    return out


def test_every_spelling_loads() -> None:
    """Both prefixes, fused and single experts (BL-082), table in parts and in one piece."""
    config, _, module, tensors = cases.random_module()
    layout = cases.plugin().layout(cases.plugin().architecture(config))
    assert len([name for name in tensors if ".shard_" in name]) == 4
    with_suffix = {n + ".weight" if ".experts." in n else n: t for n, t in tensors.items()}
    for form in (
        tensors,
        with_suffix,
        apart(tensors),
        in_one_table(tensors),
        in_one_table(apart(tensors)),
    ):
        for prefix in (RELEASED, THEIRS):
            named = {name.replace(RELEASED, prefix): tensor for name, tensor in form.items()}
            other = cases.plugin().build(cases.plugin().architecture(config), cases.kernels(5))
            with torch.no_grad():
                for tensor in (*other.parameters(), *other.buffers()):
                    tensor.fill_(7)
            load_named(other, layout, named.items())
            for name, tensor in module.state_dict().items():
                assert tensor.equal(other.state_dict()[name]), f"{name} under {prefix}"


def test_release_with_vision_and_draft_head(tmp_path: Path) -> None:
    """The text model inside a multimodal checkpoint: the rest is not loaded, and exported."""
    config, _, module, tensors = cases.random_module()
    extra = {
        "model.visual.blocks.0.attn.qkv.weight": torch.randn(6, 4),
        "mtp.layers.0.mlp.experts.down_proj": torch.randn(2, 3, 4),
        "mtp.pre_fc_norm_hidden.weight": torch.randn(8).bfloat16(),
    }
    statistics = {f"{RELEASED}layers.1.ple.ple_embedding.hashstats_rows": torch.zeros(2)}
    text = {**config, "model_type": "qwen3_8_flash_next_text"}
    outer = {**OUTER, "model_type": "qwen3_8_flash_next", "text_config": text}
    write_checkpoint(tmp_path / "a", outer, {**tensors, **extra, **statistics})
    setup, loaded = cases.ours(tmp_path / "a")
    for name, tensor in module.state_dict().items():
        assert tensor.equal(loaded.state_dict()[name]), name
    kept = dict(kept_tensors(setup.layout, TensorFiles(tmp_path / "a")))
    assert kept.keys() == extra.keys() and all(kept[n].equal(t) for n, t in extra.items())
    named = [*iter_checkpoint(loaded, setup.layout), *kept.items()]
    save_checkpoint(tmp_path / "b", named, setup.export_config())
    written = load_file(tmp_path / "b" / "model.safetensors")
    assert written.keys() == tensors.keys() | extra.keys()
    assert all(written[name].equal(tensor) for name, tensor in {**tensors, **extra}.items())


def quantised(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(FP8, scales of 128 x 128 blocks, what they stand for)."""
    rows, columns = tensor.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    stored = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    meant = torch.empty_like(tensor)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            box = slice(128 * i, 128 * (i + 1)), slice(128 * j, 128 * (j + 1))
            scales[i, j] = tensor[box].abs().max() / 448
            stored[box] = (tensor[box] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[box] = stored[box].float() * scales[i, j]
    return stored, scales, meant


def test_fp8_release(tmp_path: Path) -> None:
    """Experts in blocks of 128 x 128, edges included, the table with one number for all parts; the
    export is plain and says so."""
    sizes = {"hidden_size": 136, "moe_intermediate_size": 140, "num_experts": 2}
    config, _, _, tensors = cases.random_module(num_experts_per_tok=2, **sizes)
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for name, tensor in apart(tensors).items():
        if ".experts." in name:
            stored[name], stored[name + "_scale_inv"], meant[name] = quantised(tensor)
        elif ".shard_" in name:
            scale = torch.tensor(0.0021)
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[name.split("shard_")[0] + "weight_scale"] = scale
            meant[name] = stored[name].float() * scale
        else:
            stored[name] = meant[name] = tensor
    quantisation = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    text = {**config, "ple_embedding_dtype": "float8_e4m3fn"}
    write_checkpoint(tmp_path / "fp8", {**OUTER, **quantisation, "text_config": text}, stored)
    setup, module = cases.ours(tmp_path / "fp8")
    assert apart(saved(module, setup.layout)).keys() == meant.keys()
    for name, tensor in apart(saved(module, setup.layout)).items():
        assert tensor.equal(meant[name]), name
    exported = setup.export_config()
    assert "quantization_config" not in exported
    assert "ple_embedding_dtype" not in exported["text_config"]
    load_named(module, setup.layout, stored.items())
    for name, tensor in apart(saved(module, setup.layout)).items():
        assert tensor.equal(meant[name]), f"{name} by stream"
    missing = {name: tensor for name, tensor in stored.items() if "weight_scale" not in name}
    write_checkpoint(tmp_path / "fp8", {**OUTER, "text_config": text}, missing)
    with pytest.raises(WeightError, match="weight_scale"):
        cases.ours(tmp_path / "fp8")


def test_exported_config(tmp_path: Path) -> None:
    """What servers need: one end-of-text token, released layer names, the parts of the table in the
    text part alone; everything else as it was read."""
    config, architecture, _, _ = cases.random_module("two tables")
    types = ["linear_attention"] * 3 + ["qwen_sparse_attention", "linear_attention"]
    text = {**config, "layer_types": types, "some_future_key": [1, 2]}
    outer = {**OUTER, "text_config": text}
    exported = cases.plugin().export_config(outer, architecture)
    assert exported["architectures"] == ["Qwen4ExpForConditionalGeneration"]
    assert exported["model_type"] == "qwen4_exp" and exported["vision_config"] == {"depth": 1}
    assert "split_ngram_parts" not in exported
    wanted = {**text, "eos_token_id": 2, "layer_types": config["layer_types"]}
    assert exported["text_config"] == wanted
    assert outer["split_ngram_parts"] == 512 and text["layer_types"] is types  # not changed
    (tmp_path / "config.json").write_text(json.dumps({**exported, "vision_config": None}))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.text_config.ple_layer_ids == [1, 3] and read.text_config.indexer_budget == 8
    alone = cases.plugin().export_config(config, architecture)
    assert alone == {**config, "eos_token_id": 2}


def test_outer_export_is_read_by_transformers(tmp_path: Path) -> None:
    """A multimodal config.json with released names: the text model loads to the same logits."""
    model = cases.theirs()
    model.save_pretrained(tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    tensors = load_file(tmp_path / "theirs" / "model.safetensors")
    write_checkpoint(
        tmp_path / "a", {**OUTER, "vision_config": None, "text_config": config}, tensors
    )
    setup, module = cases.ours(tmp_path / "a")
    save_checkpoint(tmp_path / "b", iter_checkpoint(module, setup.layout), setup.export_config())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "b", attn_implementation="eager")
    assert type(again).__name__ == "Qwen4ExpForCausalLM"
    assert cases.logits_of_theirs(again).equal(cases.logits_of_theirs(model))


def test_other_hash_constants_are_refused() -> None:
    """A checkpoint whose constants do not follow from its config.json would read wrong rows."""
    config, _, _, tensors = cases.random_module()
    for name in ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets"):
        full = f"{RELEASED}layers.1.ple.ple_embedding.{name}"
        changed = {**tensors, full: tensors[full] + 2}
        other = cases.plugin().build(cases.plugin().architecture(config), cases.kernels(5))
        layout = cases.plugin().layout(cases.plugin().architecture(config))
        load_named(other, layout, changed.items())
        with pytest.raises(WeightError, match="n-gram table of layer 1"):
            other(PackedBatch.from_documents([[3, 4]]))


@pytest.mark.parametrize(
    "name",
    [
        "layers.1.ple.ple_embedding.ngram_embedding.shard_2.weight",
        "layers.0.attn_hyper_connection.block_inject_weight.weight",
        "layers.2.linear_attn.A_log",
        "layers.3.self_attn.indexer.k_layernorm.weight",
        "layers.4.mlp.experts.down_proj",
        "hyper_connection_mixer.hc_norm.weight",
    ],
)
def test_wrong_tensors_are_named(name: str, tmp_path: Path) -> None:
    """Missing, mis-shaped and extra ones."""
    config, _, _, tensors = cases.random_module()
    full = RELEASED + name
    missing = {key: tensor for key, tensor in tensors.items() if key != full}
    shorter = {**tensors, full: tensors[full][:-1]}
    extra = {**tensors, full + "_extra": torch.ones(1)}
    for wrong in (missing, shorter, extra):
        write_checkpoint(tmp_path / "wrong", config, wrong)
        with pytest.raises(WeightError, match=name.replace(".", r"\.")):
            cases.ours(tmp_path / "wrong")
