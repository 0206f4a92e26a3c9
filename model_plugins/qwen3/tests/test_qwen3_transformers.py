"""Qwen3 against transformers: logits, all gradients, checkpoints in both directions."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from prime_rl.api import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.errors import WeightError
from prime_rl.models.head import head_weight
from prime_rl.models.load import load_named, load_weights
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.setup import ModelSetup, build, prepare
from prime_rl.plugins import scan

SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
EXPERTS = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "norm_topk_prob": True,
    "mlp_only_layers": [1],
}
PLAIN = {"rope_type": "default", "rope_theta": 1e6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
CONFIGS = {
    "dense": Qwen3Config(**SIZES, rope_parameters=PLAIN),
    "tied": Qwen3Config(
        **SIZES, rope_parameters=PLAIN, tie_word_embeddings=True, attention_bias=True
    ),
    "yarn": Qwen3Config(**SIZES, rope_parameters={**YARN, "original_max_position_embeddings": 16}),
    "linear": Qwen3Config(**SIZES, rope_parameters={**YARN, "rope_type": "linear"}),
    "moe": Qwen3MoeConfig(**SIZES, **EXPERTS, rope_parameters=PLAIN),
    "moe raw weights": Qwen3MoeConfig(
        **SIZES,
        **{**EXPERTS, "norm_topk_prob": False},
        decoder_sparse_step=2,
        rope_parameters=PLAIN,
    ),
}


def theirs(name: str) -> torch.nn.Module:
    """A transformers model whose norms and biases are random, too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.normal_(1.0 if "norm" in key else 0.0, 0.2)
    return model


def ours(directory: Path) -> tuple[ModelSetup, torch.nn.Module]:
    """The same model through our loader, from the meta device."""
    registry = scan()
    config = ModelConfig.model_validate({}, context=ValidationContext(registry.config_class))
    setup = prepare(config, directory, registry)
    module = build(setup)
    load_weights(module, setup.layout, directory)
    return setup, module


def documents() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(128, (length,), generator=generator).tolist() for length in (7, 1, 33, 18)
    ]


def logits_of_theirs(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([model(torch.tensor([document])).logits[0] for document in documents()])


def logits_of_ours(module: torch.nn.Module) -> torch.Tensor:
    return module(PackedBatch.from_documents(documents())) @ head_weight(module).T


def assert_close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    error = (found - expected).abs().max()
    assert error <= 1e-4 * expected.abs().max(), f"{what}: off by {error:.3g}"


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients(name: str, tmp_path: Path) -> None:
    """A checkpoint that transformers wrote; packed here, one document at a time there."""
    model = theirs(name)
    model.save_pretrained(tmp_path)
    setup, module = ours(tmp_path)
    found, expected = logits_of_ours(module), logits_of_theirs(model)
    assert_close(found, expected, "logits")
    upstream = torch.linspace(-1, 1, expected.numel()).sin().view_as(expected)
    found.backward(upstream)
    expected.backward(upstream)
    gradients = ((key, p.grad) for key, p in module.named_parameters() if p.grad is not None)
    by_name = dict(setup.layout.stream(gradients))
    for key, parameter in model.named_parameters():
        gradient = by_name.pop(key, None)
        if gradient is None:  # transformers stacks experts at run time
            parts = _expert_parts(key, by_name)
            gradient = torch.stack(parts) if parts else None
        assert gradient is not None, f"no gradient for {key}"
        assert_close(gradient, parameter.grad, f"gradient of {key}")
    assert not by_name, f"gradients transformers does not have: {sorted(by_name)}"


def _expert_parts(key: str, by_name: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The per-expert gradients that transformers' stacked tensor `key` holds."""
    stem, _, kind = key.rpartition(".")
    if kind == "down_proj":
        return [by_name.pop(f"{stem}.{expert}.down_proj.weight") for expert in range(8)]
    assert kind == "gate_up_proj", key
    return [
        torch.cat([by_name.pop(f"{stem}.{expert}.{name}_proj.weight") for name in ("gate", "up")])
        for expert in range(8)
    ]


@pytest.mark.parametrize("name", ["dense", "tied", "moe"])
def test_our_export_is_theirs(name: str, tmp_path: Path) -> None:
    """Export in several shards; transformers loads it to the same bits and logits."""
    model = theirs(name)
    model.save_pretrained(tmp_path / "theirs")
    setup, module = ours(tmp_path / "theirs")
    tensors = iter_checkpoint(module, setup.layout)
    save_checkpoint(tmp_path / "ours", tensors, setup.export_config(), shard_bytes=100_000)
    assert len(list((tmp_path / "ours").glob("*.safetensors"))) > 1
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for (key, before), after in zip(model.named_parameters(), again.parameters(), strict=True):
        assert before.equal(after), key
    assert logits_of_theirs(again).equal(logits_of_theirs(model))
    written: dict[str, torch.Tensor] = {}
    for file in (tmp_path / "ours").glob("*.safetensors"):
        written |= load_file(file)
    original = load_file(tmp_path / "theirs" / "model.safetensors")
    assert written.keys() == original.keys()
    assert all(written[key].equal(original[key]) for key in original)


@pytest.mark.parametrize("suffix", ["", ".weight"])
def test_stacked_experts_load(suffix: str, tmp_path: Path) -> None:
    """Checkpoints that hold the experts of a layer in one tensor, named both ways (BL-082)."""
    model = theirs("moe")
    model.save_pretrained(tmp_path)
    setup, module = ours(tmp_path)
    expected = logits_of_ours(module)
    stacked = {
        key + suffix if key.endswith(("gate_up_proj", "down_proj")) else key: tensor
        for key, tensor in model.state_dict().items()
    }
    assert stacked[f"model.layers.0.mlp.experts.gate_up_proj{suffix}"].shape == (8, 80, 64)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    load_named(module, setup.layout, stacked.items())
    assert logits_of_ours(module).equal(expected)
    save_file(stacked, tmp_path / "model.safetensors")
    _, other = ours(tmp_path)
    assert logits_of_ours(other).equal(expected)
    key = f"model.layers.0.mlp.experts.down_proj{suffix}"
    stacked[key + "0"] = stacked.pop(key)
    with pytest.raises(WeightError, match="down_proj"):
        load_named(module, setup.layout, stacked.items())


def test_tied_head_may_be_in_the_file(tmp_path: Path) -> None:
    """BL-078: both names load, one is written, and only the head's own name is let through."""
    model = theirs("tied")
    model.save_pretrained(tmp_path)
    setup, module = ours(tmp_path)
    names = [name for name, _ in iter_checkpoint(module, setup.layout)]
    assert "lm_head.weight" not in names and names.count("model.embed_tokens.weight") == 1
    both = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    assert "lm_head.weight" in both
    load_named(module, setup.layout, both.items())
    save_file(both, tmp_path / "model.safetensors")
    _, again = ours(tmp_path)
    assert logits_of_ours(again).equal(logits_of_ours(module))
    both["value_model.lm_head.weight"] = both["lm_head.weight"]
    with pytest.raises(WeightError, match="value_model.lm_head.weight"):
        load_named(module, setup.layout, both.items())


def test_export_keeps_the_config(tmp_path: Path) -> None:
    model = theirs("moe")
    model.save_pretrained(tmp_path)
    setup, _ = ours(tmp_path)
    assert setup.export_config() == json.loads((tmp_path / "config.json").read_text())


def test_bfloat16_forward_is_near_float32(tmp_path: Path) -> None:
    """8 bits of mantissa through three layers: within 3 % of the largest logit."""
    model = theirs("dense")
    model.save_pretrained(tmp_path)
    setup, module = ours(tmp_path)
    small = build(setup, dtype=torch.bfloat16)
    load_weights(small, setup.layout, tmp_path)
    assert all(parameter.dtype == torch.bfloat16 for parameter in small.parameters())
    found, expected = logits_of_ours(small).float(), logits_of_ours(module)
    assert (found - expected).abs().max() <= 0.03 * expected.abs().max()
