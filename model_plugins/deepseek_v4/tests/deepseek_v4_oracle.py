"""transformers' model with random everything, and ours with the same weights."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM

from prime_rl.api import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.models.head import head_weight
from prime_rl.models.load import load_named
from prime_rl.models.setup import ModelSetup, build, prepare
from prime_rl.plugins import scan

SLIDING, CSA, HCA = (
    "sliding_attention",
    "compressed_sparse_attention",
    "heavily_compressed_attention",
)
YARN = {
    "rope_type": "yarn",
    "factor": 16,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "q_lora_rank": 32,
    "num_experts_per_tok": 2,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "layer_types": [SLIDING, CSA, HCA, CSA, SLIDING, HCA],
    "compress_rates": {CSA: 4, HCA: 16},
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe", "moe", "moe"],
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "sliding_window": 8,
    "o_groups": 2,
    "o_lora_rank": 16,
    "index_n_heads": 16,
    "index_head_dim": 16,
    "index_topk": 4,
    "swiglu_limit": 10.0,
    "partial_rotary_factor": 8 / 32,
    "pad_token_id": None,
}
"""Every kind of layer, small enough that 61 tokens have more entries than the indexer chooses."""
LENGTHS = (61, 1, 33, 18, 4, 7)


def oracle_config(**changes: Any) -> DeepseekV4Config:
    settings = {**SIZES, "rope_parameters": dict(YARN), **changes}
    return DeepseekV4Config(**settings, attn_implementation="eager")


def theirs(**changes: Any) -> nn.Module:
    """Everything that starts at 0 or 1 is random, too, and some experts reach their limit."""
    torch.manual_seed(0)
    model = DeepseekV4ForCausalLM(oracle_config(**changes)).eval()
    generator = torch.Generator().manual_seed(1)

    def normal(tensor: Tensor, spread: float, mean: float = 0.0) -> None:
        tensor.copy_(torch.empty(tensor.shape).normal_(mean, spread, generator=generator))

    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if "norm" in name:
                normal(tensor, 0.2, 1.0)
            elif name.endswith(("sinks", "base", "position_bias", "correction_bias")):
                normal(tensor, 0.3)
            elif name.endswith(("scale", "hc_scale")):
                normal(tensor, 0.2, 1.0)
            elif name.endswith("tid2eid"):
                chances = torch.rand(tensor.shape[0], 8, generator=generator)
                tensor.copy_(chances.topk(tensor.shape[1]).indices)
            elif tensor.dim() > 1:
                normal(tensor, 0.1)
    return model


def directory_of(model: nn.Module, path: Path) -> Path:
    """A folder with the model's config.json, as transformers writes it."""
    model.config.architectures = ["DeepseekV4ForCausalLM"]
    model.config.save_pretrained(path)
    return path


def setup_of(directory: Path) -> ModelSetup:
    registry = scan()
    config = ModelConfig.model_validate({}, context=ValidationContext(registry.config_class))
    return prepare(config, directory, registry)


def ours(model: nn.Module, path: Path) -> tuple[ModelSetup, nn.Module]:
    """The same model, filled with transformers' names."""
    setup = setup_of(directory_of(model, path))
    module = build(setup, "cpu")
    load_named(module, setup.layout, model.state_dict().items())
    return setup, module


def documents(lengths: tuple[int, ...] = LENGTHS, vocabulary: int = 128) -> list[list[int]]:
    generator = torch.Generator().manual_seed(2)
    return [
        torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


def logits_of_theirs(model: nn.Module, texts: list[list[int]]) -> Tensor:
    """One call per document: transformers lets compressed entries and indexer cross documents of a
    packed row."""
    return torch.cat([model(torch.tensor([text])).logits[0] for text in texts])


def logits_of_ours(module: nn.Module, texts: list[list[int]]) -> Tensor:
    hidden_TD: Tensor = module(PackedBatch.from_documents(texts))
    return hidden_TD @ head_weight(module).T


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest value."""
    gap = (found - expected).abs().max().item()
    return gap / max(expected.abs().max().item(), 1e-30)


def by_their_names(setup: ModelSetup, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Runtime tensors under transformers' names, experts stacked."""
    released = dict(setup.layout.stream(tensors.items()))
    named: dict[str, Tensor] = {}
    for entry in setup.layout.entries.values():
        if entry.runtime not in tensors:
            continue
        if entry.alternatives:
            (leaf,) = entry.alternatives[0].leaves()
            named[leaf.name] = tensors[entry.runtime]
        else:
            named |= {leaf.aliases[0]: released[leaf.name] for leaf in entry.source.leaves()}
    return named
