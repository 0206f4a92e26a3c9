"""Tiny Nemotron-H models for the tests of this folder, ours and transformers'."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, NemotronHConfig

from prime_rl.api import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.models.head import head_weight
from prime_rl.models.load import load_weights
from prime_rl.models.setup import ModelSetup, build, prepare
from prime_rl.plugins import scan

SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "hybrid_override_pattern": "ME*-ME",
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "mlp_hidden_act": "relu2",
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 8,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 56,
    "moe_latent_size": 24,
    "num_experts_per_tok": 3,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "layer_norm_epsilon": 1e-5,
}
NO_CLAMP = {"time_step_min": 1e-30}
"""transformers clamps time steps from below to time_step_min, which no server does. This switches
the clamp off; 0 would break its initialisation."""
VARIANTS: dict[str, dict[str, Any]] = {
    "latent": {},
    "plain": {"moe_latent_size": None},
    "grouped": {"n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    "one group": {"n_groups": 1, "use_conv_bias": False, "conv_kernel": 3, "chunk_size": 5},
}


def theirs(variant: str = "latent", **changes: Any) -> torch.nn.Module:
    """A transformers model in float32 in which nothing is at its start value of 0 or 1."""
    torch.manual_seed(0)
    config = NemotronHConfig(**{**SIZES, **NO_CLAMP, **VARIANTS[variant], **changes})
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("e_score_correction_bias"):
                tensor.normal_(0.0, 0.3)
            elif name.endswith("dt_bias"):
                tensor.normal_(-4.0, 2.0)
            elif name.endswith("A_log"):
                tensor.uniform_(0.0, 2.0)
            elif name.endswith((".D", "norm.weight", "norm_f.weight")):
                tensor.normal_(1.0, 0.3)
            elif "conv1d" in name:
                tensor.normal_(0.0, 0.4)
            else:  # every layer must matter, which it does not with the config's 0.02
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
    return model


def ours(directory: Path) -> tuple[ModelSetup, torch.nn.Module]:
    """The checkpoint through our loader, from the meta device."""
    registry = scan()
    config = ModelConfig.model_validate({}, context=ValidationContext(registry.config_class))
    setup = prepare(config, directory, registry)
    module = build(setup)
    load_weights(module, setup.layout, directory)
    return setup, module


def documents(*lengths: int) -> list[list[int]]:
    """Random tokens; by default lengths that are no multiples of the chunk."""
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(128, (length,), generator=generator).tolist()
        for length in lengths or (11, 1, 37, 9)
    ]


def logits_of_theirs(model: torch.nn.Module, texts: list[list[int]]) -> torch.Tensor:
    """One call per document: transformers does not reset Mamba state in a packed row."""
    return torch.cat([model(torch.tensor([text])).logits[0] for text in texts])


def logits_of_ours(module: torch.nn.Module, texts: list[list[int]]) -> torch.Tensor:
    """All documents in one row."""
    return module(PackedBatch.from_documents(texts)) @ head_weight(module).T


def assert_close(
    found: torch.Tensor, expected: torch.Tensor, what: str, relative: float = 1e-4
) -> None:
    """Largest difference against the largest expected value."""
    error = (found - expected).abs().max()
    assert error <= relative * expected.abs().max(), (
        f"{what}: off by {error:.3g}, the largest value is {expected.abs().max():.3g}"
    )
