"""Tiny Qwen3.8 models for the tests of this folder, ours and transformers'."""

from pathlib import Path
from typing import Any

import torch
from prime_rl_model_qwen3_8 import Qwen38
from transformers import AutoModelForCausalLM, Qwen4ExpTextConfig

from prime_rl.api import Kernels, PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.models.head import head_weight
from prime_rl.models.load import load_weights
from prime_rl.models.setup import ModelSetup, build, prepare
from prime_rl.plugins import scan
from prime_rl.testing.layout import saved

LINEAR, FULL = "linear_attention", "full_attention"
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e7,
        "partial_rotary_factor": 0.25,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
    "layer_types": [LINEAR, LINEAR, LINEAR, FULL, LINEAR],
    "hc_count": 4,
    "hc_lowrank": 12,
    "ple_layer_ids": [2],
    "ple_embed_dim": 64,
    "ple_conv_kernel_size": 4,
    "ngram_size": 3,
    "heads_per_ngram": 2,
    "ngram_vocab_size_base": 50,
    "make_ngram_vocab_size_divisible_by": 16,
    "split_ngram_parts": 4,
    "seed": 1234,
    "indexer_n_heads": 8,  # with few heads, many scores are exactly 0 and any choice is right
    "indexer_kv_heads": 1,
    "indexer_head_dim": 16,
    "indexer_budget": 8,
    "indexer_compress_ratio": 4,
    "output_gate_type": "sigmoid",
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "released": {},
    "two tables": {
        "ple_layer_ids": [1, 3],
        "ngram_size": 4,
        "heads_per_ngram": 4,
        "ple_embed_dim": 48,
        "split_ngram_parts": 5,
        "ple_conv_kernel_size": 2,
        "eos_token_id": [2, 1],
        "linear_num_key_heads": 3,
        "linear_value_head_dim": 24,
    },
    "other switches": {
        "ple_layer_ids": [],
        "output_gate_type": None,
        "norm_topk_prob": False,
        "layer_types": [FULL, LINEAR, FULL, LINEAR, FULL],
        "indexer_budget": 6,
        "indexer_compress_ratio": 2,
        "num_key_value_heads": 1,
        "linear_conv_kernel_dim": 2,
        "hc_count": 2,
    },
}


def theirs(variant: str = "released", **changes: Any) -> torch.nn.Module:
    """A transformers model in float32 in which nothing is at its start value of 0 or 1."""
    torch.manual_seed(0)
    config = Qwen4ExpTextConfig(**{**SIZES, **VARIANTS[variant], **changes})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.norm.weight"):
                parameter.normal_(1.0, 0.3)
            elif "A_log" in name:
                parameter.normal_(0.0, 1.0)
            elif parameter.dim() == 1:
                parameter.normal_(0.0, 0.3)
            else:
                parameter.normal_(0.0, 0.3 if "conv1d" in name else 0.12)
    return model


def ours(
    directory: Path, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[ModelSetup, torch.nn.Module]:
    """The same model through our loader, from the meta device."""
    registry = scan()
    config = ModelConfig.model_validate(
        {"options": options}, context=ValidationContext(registry.config_class)
    )
    setup = prepare(config, directory, registry)
    module = build(setup, dtype=dtype)
    load_weights(module, setup.layout, directory)
    return setup, module


def plugin(**options: Any) -> Qwen38:
    """The plugin with these options."""
    return Qwen38(Qwen38.Config(type="qwen3_8", **options))


def random_module(
    variant: str = "released", **changes: Any
) -> tuple[dict[str, Any], Any, torch.nn.Module, dict[str, torch.Tensor]]:
    """Config, architecture, module with random weights, the same weights by released name."""
    config = {"model_type": "qwen4_exp_text", **SIZES, **VARIANTS[variant], **changes}
    architecture = plugin().architecture(config)
    module = plugin().build(architecture, kernels(architecture.num_layers))
    generator = torch.Generator().manual_seed(5)
    plugin().initialise(module, generator)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 0.3 if parameter.dim() == 1 or name.endswith("conv") else 0.15
            noise = torch.empty(parameter.shape).normal_(0.0, spread, generator=generator)
            parameter.copy_(1 + noise if name.endswith("delta.norm") else noise)
    return config, architecture, module, saved(module, plugin().layout(architecture))


def kernels(layers: int) -> Kernels:
    """Core's reference back ends."""
    return Kernels(
        TorchAttention(TorchAttentionConfig()),
        [TorchMoE(TorchMoEConfig())] * layers,
        TorchDSA(TorchDSAConfig()),
    )


def documents() -> list[list[int]]:
    """Sparse rows, a document of one token, end-of-text tokens inside."""
    generator = torch.Generator().manual_seed(1)
    texts = [torch.randint(128, (n,), generator=generator).tolist() for n in (37, 1, 5, 90)]
    for text, places in ((texts[0], (4, 5, 20)), (texts[3], (0, 30))):
        for place in places:
            text[place] = 1
    return texts


def logits_of_theirs(model: torch.nn.Module) -> torch.Tensor:
    """One document at a time: transformers lets packed documents leak into each other."""
    return torch.cat([model(torch.tensor([text])).logits[0] for text in documents()])


def logits_of_ours(module: torch.nn.Module) -> torch.Tensor:
    """Packed."""
    return module(PackedBatch.from_documents(documents())) @ head_weight(module).T


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, what: str, limit: float = 1e-4
) -> None:
    """Largest difference relative to the largest value."""
    assert found.shape == expected.shape, f"{what}: {found.shape} and {expected.shape}"
    error = (found - expected).abs().max() / expected.abs().max().clamp_min(1e-12)
    assert error <= limit, f"{what}: off by {error:.3g}"
