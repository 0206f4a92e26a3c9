"""The tiny GLM-5 of the tests: a transformers model with every weight random, and ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.models.load import load_weights
from prime_rl.models.setup import ModelSetup, build, prepare
from prime_rl.plugins import scan

TINY: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
    "first_k_dense_replace": 2,
    "index_topk": 8,
    "index_head_dim": 16,
    "index_n_heads": 16,
    "indexer_types": ["full", "full", "shared", "full", "shared", "shared"],
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "indexer_rope_interleave": True,
    "index_topk_pattern": "FFSFSS",
}
"""Dense and sparse layers, full and shared ones, two shared in a row (spec section 11)."""


@pytest.fixture
def tiny() -> dict[str, Any]:
    """config.json of the tiny model."""
    return dict(TINY)


@pytest.fixture
def documents() -> list[list[int]]:
    """Token lists, two of them much longer than the 8 keys a query may attend to."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(128, (length,), generator=generator).tolist() for length in (7, 1, 50, 18)
    ]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that transformers wrote."""
    directory = tmp_path_factory.mktemp("glm5")
    theirs(TINY).save_pretrained(directory)
    return directory


def theirs(config: dict[str, Any], seed: int = 0) -> GlmMoeDsaForCausalLM:
    """A transformers model with random norms, biases and selection biases.

    transformers fixes the epsilon of the two latent norms at 1e-6; servers and we take
    rms_norm_eps, so the oracle is corrected here.
    """
    torch.manual_seed(seed)
    keys = {key: value for key, value in config.items() if key != "model_type"}
    settings = GlmMoeDsaConfig(**keys, pad_token_id=None, attn_implementation="eager")
    model = GlmMoeDsaForCausalLM(settings).float().eval()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                tensor.normal_(1.0 if name.endswith("weight") else 0.0, 0.2)
            elif name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.1)
            elif "inv_freq" not in name:
                tensor.mul_(3.0)  # logits and scores that differ by more than rounding
    return correct_latent_norms(model)


def correct_latent_norms(model: GlmMoeDsaForCausalLM) -> GlmMoeDsaForCausalLM:
    """rms_norm_eps where transformers has 1e-6."""
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.variance_epsilon = model.config.rms_norm_eps
    return model


def ours(directory: Path, dtype: torch.dtype = torch.float32) -> tuple[ModelSetup, torch.nn.Module]:
    """The model of a checkpoint through our loader, from the meta device."""
    registry = scan()
    config = ModelConfig.model_validate({}, context=ValidationContext(registry.config_class))
    setup = prepare(config, directory, registry)
    module = build(setup, dtype=dtype)
    load_weights(module, setup.layout, directory)
    return setup, module


@pytest.fixture
def make_theirs() -> Any:
    """The function `theirs`."""
    return theirs


@pytest.fixture
def make_ours() -> Any:
    """The function `ours`."""
    return ours


@pytest.fixture
def corrected() -> Any:
    """The function `correct_latent_norms`."""
    return correct_latent_norms
