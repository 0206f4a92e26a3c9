"""config.json of Qwen3: spellings that are read, values that are refused, figures of full sizes."""

from typing import Any

import pytest
import torch
from prime_rl_model_qwen3 import Qwen3, Qwen3MoE

from prime_rl.api import Kernels, Model
from prime_rl.errors import ConfigError
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.models.load import runtime_tensors

SMALL: dict[str, Any] = {  # the published 0.6B
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
}
LARGE: dict[str, Any] = {  # the published 30B-A3B
    **SMALL,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}


def dense() -> Qwen3:
    return Qwen3(Qwen3.Config(type="qwen3"))


def experts() -> Qwen3MoE:
    return Qwen3MoE(Qwen3MoE.Config(type="qwen3_moe"))


def test_theta_old_and_new_spelling() -> None:
    new = {key: value for key, value in SMALL.items() if key != "rope_theta"}
    new["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000}
    assert dense().architecture(new) == dense().architecture(SMALL)
    other = {**SMALL, "rope_theta": 5000000}
    assert dense().architecture(other) != dense().architecture(SMALL)


def test_yarn_old_and_new_spelling() -> None:
    yarn = {"factor": 4.0, "original_max_position_embeddings": 32768}
    old = {**SMALL, "rope_scaling": {"type": "yarn", **yarn}}
    new = {**SMALL, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1000000, **yarn}}
    assert dense().architecture(old).rotary == dense().architecture(new).rotary
    assert dense().architecture(old).rotary != dense().architecture(SMALL).rotary


def test_expert_count_old_and_new_spelling() -> None:
    renamed = {key: value for key, value in LARGE.items() if key != "num_experts"}
    renamed["num_local_experts"] = 128
    assert experts().architecture(renamed) == experts().architecture(LARGE)
    assert experts().architecture(LARGE).experts.count == 128


def test_which_layers_have_experts() -> None:
    config = {**LARGE, "num_hidden_layers": 6, "mlp_only_layers": [1], "decoder_sparse_step": 2}
    architecture = experts().architecture(config)
    assert architecture.moe_layers == (3, 5)
    assert architecture.dense_layers == (0, 1, 2, 4)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("use_sliding_window", True),
        ("hidden_act", "gelu"),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("rope_parameters", {"rope_type": "longrope", "factor": 2.0}),
        ("num_key_value_heads", 3),
        ("hidden_size", "large"),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", True),
        ("head_dim", 33),
        ("rms_norm_eps", float("nan")),
        ("attention_bias", "no"),
        ("num_experts_per_tok", 129),
    ],
)
def test_what_is_refused_is_named(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=key if "rope" not in key else "rope_type"):
        experts().architecture({**LARGE, key: value})


@pytest.mark.parametrize(
    ("plugin", "config", "parameters"),
    [
        (dense(), SMALL, 596_049_920),
        (experts(), LARGE, 30_532_122_624),
    ],
)
def test_full_size_on_the_meta_device(plugin: Model, config: dict, parameters: int) -> None:
    """Counts as published; every checkpoint name maps to a runtime tensor and back."""
    architecture = plugin.architecture(config)
    moe = [TorchMoE(TorchMoEConfig())] * architecture.num_layers
    with torch.device("meta"):
        module = plugin.build(architecture, Kernels(TorchAttention(TorchAttentionConfig()), moe))
    tensors = runtime_tensors(module)
    assert sum(tensor.numel() for tensor in tensors.values()) == parameters
    layout = plugin.layout(architecture)
    layout.check_runtime(tensors)
    rows = layout.table({name: tuple(tensor.shape) for name, tensor in tensors.items()})
    numbers = sum(torch.Size(row.shape).numel() for row in rows)
    assert numbers == parameters
    for row in rows:
        assert layout.runtime_for(row.name) == row.runtimes


def test_flops_of_the_full_sizes() -> None:
    """By hand, 0.6B at one document of 8192: 2 * (28 * layer + 1024 * 151936) per token, where a
    layer is 1024 * (2048 + 2 * 1024) + 2048 * 1024 + 3 * 1024 * 3072, and 4 * 2048 per pair."""
    architecture = dense().architecture(SMALL)
    layer = 1024 * (2048 + 2048) + 2048 * 1024 + 3 * 1024 * 3072
    matrices = 28 * layer + 1024 * 151936
    assert matrices == 596_049_920 - 28 * (2 * 1024 + 2 * 128) - 1024
    pairs = 8192 * 8193 / 2
    expected = 2 * matrices * 8192 + 28 * 4 * 2048 * pairs
    assert dense().flops(architecture, [8192]) == expected
    active = experts().architecture(LARGE)
    per_token = experts().flops(active, [1]) / 2
    assert 3.0e9 < per_token < 3.4e9  # "A3B", the embedding not counted
