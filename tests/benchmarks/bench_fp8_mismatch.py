"""How far each rounding of an FP8 server moves the policy, on small random DeepSeek V4 and GLM-5.

Prints KL(server || trainer) of the next token, exact over the vocabulary and averaged over tokens,
in nats: the mean of what a run reports as mismatch KL. float32 on a CPU and the trainer replays the
experts that the server chose, so nothing but the named roundings and the keys chosen by the indexer
differs.

    alone      the server rounds this, the trainer nothing
    missing    the server rounds everything, the trainer everything but this

    python tests/benchmarks/bench_fp8_mismatch.py [--tokens 512] [--seed 0]
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prime_rl.api import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import ModelConfig
from prime_rl.layers.float8_weights import round_blocks
from prime_rl.layers.routing import recording
from prime_rl.models.setup import build, prepare
from prime_rl.plugins import scan

SHARED: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "qk_rope_head_dim": 64,
    "q_lora_rank": 128,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "deepseek_v4": {
        **SHARED,
        "model_type": "deepseek_v4",
        "head_dim": 256,
        "num_key_value_heads": 1,
        "compress_ratios": [0, 4, 128, 4, 0],
        "num_hash_layers": 1,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "sliding_window": 16,
        "index_topk": 8,
        "o_groups": 2,
        "o_lora_rank": 128,
        "hc_mult": 4,
        "rope_theta": 10000.0,
    },
    "glm5": {
        **SHARED,
        "model_type": "glm_moe_dsa",
        "intermediate_size": 384,
        "num_key_value_heads": 4,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
        "index_topk": 32,
        "index_topk_pattern": "FFSF",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "indexer_rope_interleave": True,
    },
}
POLICIES = ("exact", "power_of_two", "two_step")


class Family:
    """Log-probabilities of one model with any options."""

    def __init__(self, architecture: dict[str, Any], tokens: int, seed: int) -> None:
        self.directory = Path(tempfile.mkdtemp())
        (self.directory / "config.json").write_text(json.dumps(architecture))
        self.seed = seed
        generator = torch.Generator().manual_seed(seed)
        length = tokens // 4
        texts = [torch.randint(256, (length,), generator=generator).tolist() for _ in range(4)]
        self.batch = PackedBatch.from_documents(texts)

    def switches(self) -> list[str]:
        """Options that round something."""
        fields = type(self._setup({}).plugin).Config.model_fields
        return [name for name in fields if name.endswith("_precision")]

    @torch.no_grad()
    def mismatch(self, server: dict[str, str], trainer: dict[str, str], on_grid: bool) -> float:
        """Mean over tokens of KL(server || trainer) for these options of both.

        `on_grid` puts every matrix on the 8-bit grid first, as in a dequantised release.
        """
        with recording() as record:
            served = self._logprobs(server, on_grid, self.batch)
        replayed = replace(self.batch, routed_experts=record.stacked(SHARED["num_hidden_layers"]))
        trained = self._logprobs(trainer, on_grid, replayed)
        return (served.exp() * (served - trained)).sum(-1).mean().item()

    def _logprobs(self, options: dict[str, str], on_grid: bool, batch: PackedBatch) -> Tensor:
        """[T, V]"""
        setup = self._setup(options)
        module = build(setup, "cpu", torch.float32)
        setup.plugin.initialise(module, torch.Generator().manual_seed(self.seed))
        if on_grid:
            for parameter in module.parameters():
                if parameter.dim() > 1:
                    parameter.copy_(round_blocks(parameter, "power_of_two"))
        hidden: Tensor = module(batch)
        return (hidden @ module.lm_head.weight.T).log_softmax(-1)  # type: ignore[union-attr,operator]

    def _setup(self, options: dict[str, str]) -> Any:
        registry = scan()
        config = ModelConfig.model_validate(
            {"options": options}, context=ValidationContext(registry.config_class)
        )
        return prepare(config, self.directory, registry)


def table(name: str, family: Family, on_grid: bool) -> None:
    """One line per switch, weights with each policy of scales."""
    switches = family.switches()
    print(f"\n{name}, {'weights on the 8-bit grid' if on_grid else 'new weights'}")
    print("| rounded | scales of weights | alone | missing |\n|---|---|---|---|")
    for policy in POLICIES:
        everything = {**dict.fromkeys(switches, "fp8"), "weight_scales": policy}
        for switch in switches:
            depends = switch in ("linear_precision", "grouped_output_precision")
            if policy != POLICIES[0] and not depends:
                continue
            only = {switch: "fp8", "weight_scales": policy}
            alone = family.mismatch(only, {}, on_grid)
            missing = family.mismatch(everything, {**everything, switch: "full"}, on_grid)
            print(f"| `{switch}` | {policy if depends else ''} | {alone:.1e} | {missing:.1e} |")
        alone, same = (family.mismatch(everything, t, on_grid) for t in ({}, everything))
        print(f"| all | {policy} | {alone:.1e} | {same:.0e} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, architecture in FAMILIES.items():
        family = Family(architecture, arguments.tokens, arguments.seed)
        for on_grid in (False, True):
            table(name, family, on_grid)


if __name__ == "__main__":
    main()
