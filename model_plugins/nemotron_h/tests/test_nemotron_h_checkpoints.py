"""Checkpoints of Nemotron-H: names, quantised tensors, draft layers, exports."""

import json
from pathlib import Path

import nemotron_h_cases as cases
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from prime_rl.errors import WeightError
from prime_rl.models.kept import kept_tensors
from prime_rl.models.load import load_named
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.setup import build
from prime_rl.models.tensor_files import TensorFiles

EXACT = ("A_log", ".D", "dt_bias", "gate.weight", "e_score_correction_bias")


def released(directory: Path) -> dict[str, torch.Tensor]:
    """Tensors under their release names, as transformers writes them."""
    return load_file(directory / "model.safetensors")


def test_names_of_releases_and_of_transformers(tmp_path: Path) -> None:
    """`backbone.` with one tensor per expert, `model.` with stacked ones, and mixtures load alike."""
    model = cases.theirs()
    model.save_pretrained(tmp_path)
    setup, module = cases.ours(tmp_path)
    texts = cases.documents()
    expected = cases.logits_of_ours(module, texts)
    ours = released(tmp_path)
    assert all(name.startswith(("backbone.", "lm_head.")) for name in ours)
    theirs = model.state_dict()
    assert theirs["model.layers.1.mixer.experts.up_proj"].shape == (8, 40, 24)
    renamed = {name.replace("backbone.", "model.", 1): tensor for name, tensor in ours.items()}
    stacked = {name.replace("model.", "backbone.", 1): tensor for name, tensor in theirs.items()}
    for named in (ours, theirs, renamed, stacked):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        load_named(module, setup.layout, named.items())
        assert cases.logits_of_ours(module, texts).equal(expected)
        save_file(named, tmp_path / "model.safetensors")
        assert cases.logits_of_ours(cases.ours(tmp_path)[1], texts).equal(expected)


@pytest.mark.parametrize("variant", ["latent", "plain"])
def test_our_export_is_theirs(variant: str, tmp_path: Path) -> None:
    """In several shards; transformers loads it to the same bits and logits."""
    model = cases.theirs(variant)
    model.save_pretrained(tmp_path / "theirs")
    setup, module = cases.ours(tmp_path / "theirs")
    tensors = iter_checkpoint(module, setup.layout)
    save_checkpoint(tmp_path / "ours", tensors, setup.export_config(), shard_bytes=100_000)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    for (key, before), after in zip(model.named_parameters(), again.parameters(), strict=True):
        assert before.equal(after), key
    texts = cases.documents()
    for ours, theirs in zip(again.buffers(), model.buffers(), strict=True):
        assert ours.equal(theirs)
    assert cases.logits_of_theirs(again, texts).equal(cases.logits_of_theirs(model, texts))
    files = sorted((tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 1
    written = {name: tensor for file in files for name, tensor in load_file(file).items()}
    original = released(tmp_path / "theirs")
    assert written.keys() == original.keys()
    assert all(written[key].equal(original[key]) for key in original)


def test_exported_config(tmp_path: Path) -> None:
    """What was read, kept; whoever loads it finds the pattern, however it was spelled."""
    model = cases.theirs()
    model.save_pretrained(tmp_path)
    setup, _ = cases.ours(tmp_path)
    read = json.loads((tmp_path / "config.json").read_text())
    assert "layers_block_type" in read and "hybrid_override_pattern" not in read
    assert setup.export_config() == read
    release = {"model_type": "nemotron_h", **cases.SIZES}
    exported = setup.plugin.export_config(release, setup.plugin.architecture(release))
    assert exported == {**release, "architectures": ["NemotronHForCausalLM"]}
    for number, config in enumerate((read, exported)):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        found = AutoConfig.from_pretrained(folder)
        assert found.hybrid_override_pattern == "ME*-ME"
        assert found.architectures == ["NemotronHForCausalLM"]
        assert (found.moe_latent_size, found.n_groups, found.head_dim) == (24, 2, 16)


def quantised(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """FP8 values, their scales per block of 128 x 128, and what both mean."""
    rows, columns = tensor.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    full = torch.empty_like(tensor)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            box = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            scales[i, j] = tensor[box].abs().max() / 448
            full[box] = scales[i, j]
    stored = (tensor / full).to(torch.float8_e4m3fn)
    return stored, scales, stored.float() * full


@pytest.mark.parametrize("prefix", ["backbone.", "model."])
def test_block_quantised_matrices(prefix: str, tmp_path: Path) -> None:
    """Every projection in FP8; in_proj has 328 rows: the last block is a part (BL-085)."""
    cases.theirs().save_pretrained(tmp_path)
    setup, _ = cases.ours(tmp_path)
    stored: dict[str, torch.Tensor] = {}
    meaning: dict[str, torch.Tensor] = {}
    for name, tensor in released(tmp_path).items():
        renamed = name.replace("backbone.", prefix, 1)
        if name.endswith("_proj.weight"):
            stored[renamed], stored[renamed + "_scale_inv"], meaning[name] = quantised(tensor)
        else:
            stored[renamed] = meaning[name] = tensor
    assert stored[f"{prefix}layers.0.mixer.in_proj.weight_scale_inv"].shape == (3, 1)
    save_file(stored, tmp_path / "model.safetensors")
    _, module = cases.ours(tmp_path)
    for name, tensor in iter_checkpoint(module, setup.layout):
        assert tensor.equal(meaning[name]), name
    del stored[f"{prefix}layers.5.mixer.experts.3.up_proj.weight_scale_inv"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"experts\.3\.up_proj\.weight_scale_inv"):
        cases.ours(tmp_path)
    with pytest.raises(WeightError, match=r"experts\.3\.up_proj\.weight"):
        load_named(module, setup.layout, stored.items())


def test_draft_layers_are_carried_along(tmp_path: Path) -> None:
    cases.theirs().save_pretrained(tmp_path)
    draft = {
        "mtp.layers.0.eh_proj.weight": torch.randn(64, 128),
        "mtp.layers.1.mixer.experts.0.up_proj.weight": torch.randn(40, 24).bfloat16(),
    }
    save_file({**released(tmp_path), **draft}, tmp_path / "model.safetensors")
    setup, module = cases.ours(tmp_path)
    kept = dict(kept_tensors(setup.layout, TensorFiles(tmp_path)))
    assert kept.keys() == draft.keys()
    assert all(kept[name].equal(tensor) for name, tensor in draft.items())
    assert not any("mtp" in name for name, _ in iter_checkpoint(module, setup.layout))


@pytest.mark.parametrize(
    "name",
    [
        "backbone.layers.0.mixer.conv1d.weight",
        "backbone.layers.1.mixer.gate.e_score_correction_bias",
        "backbone.layers.1.mixer.fc1_latent_proj.weight",
        "backbone.layers.2.mixer.k_proj.weight",
        "backbone.layers.4.mixer.A_log",
        "backbone.layers.5.mixer.experts.7.down_proj.weight",
    ],
)
def test_wrong_tensors_fail_with_their_name(name: str, tmp_path: Path) -> None:
    cases.theirs().save_pretrained(tmp_path)
    whole = released(tmp_path)
    squeezed = whole[name].flatten() if whole[name].dim() > 1 else whole[name][:-1]
    lacking = {key: tensor for key, tensor in whole.items() if key != name}
    wrong = ({**whole, name: squeezed}, lacking, {**lacking, name + "2": whole[name]})
    for tensors in wrong:
        save_file({k: t.clone() for k, t in tensors.items()}, tmp_path / "model.safetensors")
        with pytest.raises(WeightError, match=name.replace(".", r"\.")):
            cases.ours(tmp_path)


def test_half_precision_export_keeps_exact_tensors(tmp_path: Path) -> None:
    """Decays, skips, time-step biases and routers are float32 in every file and stream."""
    cases.theirs().save_pretrained(tmp_path)
    setup, module = cases.ours(tmp_path)
    small = build(setup, "cpu", torch.bfloat16)
    load_named(small, setup.layout, released(tmp_path).items())
    for source, dtype in ((module, torch.bfloat16), (small, None)):
        written = dict(iter_checkpoint(source, setup.layout, dtype))
        for name, tensor in written.items():
            expected = torch.float32 if name.endswith(EXACT) else torch.bfloat16
            assert tensor.dtype == expected, name
        load_named(small, setup.layout, written.items())
        again = dict(iter_checkpoint(small, setup.layout))
        assert all(again[name].equal(tensor) for name, tensor in written.items())
