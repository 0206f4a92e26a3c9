"""GLM-5 against transformers: logits, all gradients, selected keys, checkpoints both ways."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prime_rl.api import PackedBatch
from prime_rl.errors import WeightError
from prime_rl.models.head import head_weight
from prime_rl.models.load import load_named
from prime_rl.models.save import iter_checkpoint, save_checkpoint

VARIANTS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "groups": {"n_group": 4, "topk_group": 2, "n_shared_experts": 2, "norm_topk_prob": False},
    "tied": {
        "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
}


def logits_of_theirs(model: torch.nn.Module, documents: list[list[int]]) -> torch.Tensor:
    return torch.cat([model(torch.tensor([document])).logits[0] for document in documents])


def logits_of_ours(module: torch.nn.Module, documents: list[list[int]]) -> torch.Tensor:
    return module(PackedBatch.from_documents(documents)) @ head_weight(module).T


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = (found - expected).abs().max()
    assert error <= 1e-4 * expected.abs().max(), f"{what}: off by {error:.3g}"


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients(
    variant: str, tiny: Any, documents: Any, make_theirs: Any, make_ours: Any, tmp_path: Path
) -> None:
    """A checkpoint that transformers wrote; packed here, one document at a time there."""
    model = make_theirs({**tiny, **VARIANTS[variant]})
    model.save_pretrained(tmp_path)
    setup, module = make_ours(tmp_path)
    found, expected = logits_of_ours(module, documents), logits_of_theirs(model, documents)
    assert_close(found, expected, "logits")
    upstream = torch.linspace(-1, 1, expected.numel()).sin().view_as(expected)
    found.backward(upstream)
    expected.backward(upstream)
    gradients = [(key, p.grad) for key, p in module.named_parameters() if p.grad is not None]
    by_name = dict(setup.layout.stream(gradients))
    for key, parameter in model.named_parameters():
        if ".indexer." in key:  # chosen integers have no gradient, here and there
            assert parameter.grad is None and key not in by_name
            continue
        gradient = by_name.pop(key, None)
        if gradient is None:  # transformers stacks experts at run time
            gradient = torch.stack(expert_parts(key, by_name))
        assert_close(gradient, parameter.grad, f"gradient of {key}")
    assert not by_name, f"gradients transformers does not have: {sorted(by_name)}"
    without = {id(p) for _, p in module.named_parameters() if p.grad is None}
    assert without == {id(p) for p in setup.plugin.frozen_parameters(module)}
    assert len(without) == 3 * 5


def expert_parts(key: str, by_name: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The per-expert gradients that transformers' stacked tensor `key` holds."""
    stem, _, kind = key.rpartition(".")
    if kind == "down_proj":
        return [by_name.pop(f"{stem}.{expert}.down_proj.weight") for expert in range(8)]
    assert kind == "gate_up_proj", key
    return [
        torch.cat([by_name.pop(f"{stem}.{expert}.{name}_proj.weight") for name in ("gate", "up")])
        for expert in range(8)
    ]


def test_selected_keys(
    tiny: Any, documents: Any, make_theirs: Any, make_ours: Any, checkpoint: Path
) -> None:
    """The sets of rows every layer attends to, shared layers included."""
    model = make_theirs(tiny)
    _, module = make_ours(checkpoint)
    theirs_by_layer: list[list[set[int]]] = [[] for _ in range(6)]
    start = 0

    def keep(layer: int, rows: torch.Tensor) -> None:
        for token, chosen in enumerate(rows[0].tolist()):
            theirs_by_layer[layer].append({start + row for row in chosen if row <= token})

    hooks = [
        block.self_attn.register_forward_hook(lambda _, __, out, i=i: keep(i, out[2]))
        for i, block in enumerate(model.model.layers)
    ]
    for document in documents:
        logits_of_theirs(model, [document])
        start += len(document)
    for hook in hooks:
        hook.remove()
    found: list[list[set[int]]] = []
    for block in module.layers:
        block.register_forward_hook(
            lambda _, __, out: found.append([set(rows) - {-1} for rows in out[1].tolist()])
        )
    logits_of_ours(module, documents)
    assert found == theirs_by_layer
    assert max(len(rows) for rows in found[0]) == 8
    assert found[0] != found[1] != found[3] and found[1] == found[2] and found[3] == found[5]


def test_latent_norms_differ_from_uncorrected_transformers(
    tiny: Any, documents: Any, make_theirs: Any, make_ours: Any, checkpoint: Path
) -> None:
    """With the 1e-6 that transformers fixes, logits move visibly; ours then agree when
    rms_norm_eps is 1e-6 everywhere."""
    _, module = make_ours(checkpoint)
    model = make_theirs(tiny)
    expected = logits_of_theirs(model, documents)
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = 1e-6
    uncorrected = logits_of_theirs(model, documents)
    found = logits_of_ours(module, documents)
    own_error = (found - expected).abs().max()
    assert own_error < 0.5 * (found - uncorrected).abs().max()


@pytest.mark.parametrize("variant", ["tiny", "tied"])
def test_our_export_is_theirs(
    variant: str,
    tiny: Any,
    documents: Any,
    make_theirs: Any,
    make_ours: Any,
    corrected: Any,
    tmp_path: Path,
) -> None:
    """Export in several shards; transformers loads it to the same bits and logits."""
    model = make_theirs({**tiny, **VARIANTS[variant]})
    model.save_pretrained(tmp_path / "theirs")
    setup, module = make_ours(tmp_path / "theirs")
    tensors = iter_checkpoint(module, setup.layout)
    save_checkpoint(tmp_path / "ours", tensors, setup.export_config(), shard_bytes=300_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32
    )
    before, after = model.state_dict(), again.state_dict()
    assert before.keys() == after.keys()
    assert all(before[key].equal(after[key]) for key in before)
    assert logits_of_theirs(corrected(again), documents).equal(logits_of_theirs(model, documents))
    written: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "ours").glob("*.safetensors"):
        written |= load_file(file)
    original = load_file(tmp_path / "theirs" / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(written[key].equal(original[key]) for key in original)


def test_number_of_tensors(checkpoint: Path, make_theirs: Any, tiny: Any) -> None:
    """106 entries of the state dict and 194 saved tensors, as the spec counted."""
    assert len(make_theirs(tiny).state_dict()) == 106
    assert len(load_file(checkpoint / "model.safetensors")) == 194


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts_load(
    suffix: str, tiny: Any, documents: Any, make_theirs: Any, make_ours: Any, tmp_path: Path
) -> None:
    """transformers' runtime names, with and without `.weight` (BL-082)."""
    model = make_theirs(tiny)
    model.save_pretrained(tmp_path)
    setup, module = make_ours(tmp_path)
    expected = logits_of_ours(module, documents)
    stacked = {
        key + suffix if key.endswith(("gate_up_proj", "down_proj")) else key: tensor
        for key, tensor in model.state_dict().items()
    }
    assert stacked[f"model.layers.2.mlp.experts.gate_up_proj{suffix}"].shape == (8, 64, 64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    load_named(module, setup.layout, stacked.items())
    assert logits_of_ours(module, documents).equal(expected)
    save_file(stacked, tmp_path / "model.safetensors")
    _, other = make_ours(tmp_path)
    assert logits_of_ours(other, documents).equal(expected)
    key = f"model.layers.2.mlp.experts.down_proj{suffix}"
    stacked[key + "0"] = stacked.pop(key)
    with pytest.raises(WeightError, match="down_proj"):
        load_named(module, setup.layout, stacked.items())


def test_bfloat16_export_keeps_the_selection_bias(checkpoint: Path, make_ours: Any) -> None:
    setup, module = make_ours(checkpoint)
    named = dict(iter_checkpoint(module, setup.layout, torch.bfloat16))
    dtypes = {name: tensor.dtype for name, tensor in named.items()}
    biases = {name for name in dtypes if name.endswith("e_score_correction_bias")}
    assert len(biases) == 4
    assert all((dtypes[name] == torch.float32) == (name in biases) for name in dtypes)


def test_export_carries_what_servers_read(
    tiny: Any, make_theirs: Any, make_ours: Any, tmp_path: Path
) -> None:
    """A checkpoint that only transformers' keys describe gets vLLM's; the rest stays."""
    bare = {key: value for key, value in tiny.items() if key not in SERVED}
    make_theirs(bare).save_pretrained(tmp_path)
    read = json.loads((tmp_path / "config.json").read_text())
    assert not SERVED.keys() & read.keys()
    read["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(read))
    setup, _ = make_ours(tmp_path)
    del read["quantization_config"]
    assert setup.export_config() == {**read, **SERVED}


SERVED = {
    "indexer_rope_interleave": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "index_topk_pattern": "FFSFSS",
}
