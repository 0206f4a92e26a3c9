"""DeepSeek V4 behind the embedded engine, which recomputes whole sequences: kit and mismatch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from prime_rl.api import PackedBatch
from prime_rl.models.head import head_weight
from prime_rl.testing.engine import PROMPT, EngineConformance, experts_of, logprobs_of
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loss import mismatch_kl

LAYERS, PER_TOKEN, EXPERTS, NEW = 3, 2, 6, 24
STARTS = (2, 5, 8)


class TestDeepseekV4Served(EngineConformance):
    plugin_name = "embedded"
    arguments = ("--return-routed-experts", "--return-sampling-mask")
    architecture = {
        "model_type": "deepseek_v4",
        "hidden_size": 32,
        "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2,
        "head_dim": 16,
        "qk_rope_head_dim": 8,
        "q_lora_rank": 24,
        "o_groups": 2,
        "o_lora_rank": 12,
        "sliding_window": 4,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": PER_TOKEN,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "layer_types": [
            "compressed_sparse_attention",
            "heavily_compressed_attention",
            "sliding_attention",
        ],
        "compress_rates": {
            "compressed_sparse_attention": 3,
            "heavily_compressed_attention": 8,
        },
        "num_hash_layers": 1,
        "index_n_heads": 16,
        "index_head_dim": 12,
        "index_topk": 3,
        "hc_mult": 2,
        "initializer_range": 0.2,  # distributions far from uniform
    }

    @pytest.mark.parametrize("is_replayed", [False, True])
    def test_mismatch_with_the_trainer(self, engine: Any, is_replayed: bool) -> None:
        """All texts packed as the trainer packs them, its own scoring, its own mismatch KL."""
        choices = [
            engine.client.generate(PROMPT[:start], max_tokens=NEW, seed=start, ignore_eos=True)
            for start in STARTS
        ]
        texts = [
            PROMPT[:start] + choice["token_ids"]
            for start, choice in zip(STARTS, choices, strict=True)
        ]
        batch = PackedBatch.from_documents(texts)
        if is_replayed:
            batch = replace(batch, routed_experts=replayed(choices))
        module = engine.first.module
        with torch.no_grad():
            hidden = module(batch)
        firsts = batch.cu_seqlens.tolist()[:-1]
        predicting = [
            first + start - 1 + place
            for start, first in zip(STARTS, firsts, strict=True)
            for place in range(NEW)
        ]
        rows = torch.tensor(predicting)
        tokens = batch.input_ids[rows + 1]
        own, _ = token_logprobs(
            hidden[rows], head_weight(module), tokens, torch.ones(len(predicting))
        )
        served = torch.tensor([score for choice in choices for score in logprobs_of(choice)])
        assert len(set(tokens.tolist())) > 10
        assert mismatch_kl(own, served).mean() <= 1e-9

    def test_replay_follows_the_engine(self, engine: Any) -> None:
        """Other experts than the recorded ones change what the trainer computes, in the layers that
        look them up, too; the table's are what the engine recorded there."""
        choice = engine.client.generate(PROMPT, max_tokens=NEW, seed=4, ignore_eos=True)
        routes, module = replayed([choice]), engine.first.module
        batch = PackedBatch.from_documents([PROMPT + choice["token_ids"]])
        table_Vk = module.layers[0].mlp.token_experts
        assert routes[:-1, 0].equal(table_Vk[batch.input_ids[:-1]])

        def run(layers: slice, shift: int) -> torch.Tensor:
            changed = routes.clone()
            changed[:-1, layers] = (changed[:-1, layers] + shift) % EXPERTS
            with torch.no_grad():
                hidden: torch.Tensor = module(replace(batch, routed_experts=changed))
            return hidden

        with torch.no_grad():
            normal = module(batch)
        assert (run(slice(None), 0) - normal).abs().max() <= 1e-5 * normal.abs().max()
        for layers in (slice(0, 1), slice(1, None)):
            assert (run(layers, 1) - normal).abs().max() > 1e-2 * normal.abs().max()


def replayed(choices: list[dict[str, Any]]) -> torch.Tensor:
    """int64 [T, layers, k]: what the engine recorded; the last token of a text routes normally."""
    parts = []
    for choice in choices:
        recorded = torch.tensor(experts_of(choice)).long()
        assert recorded.shape[1:] == (LAYERS, PER_TOKEN) and recorded.max() < EXPERTS
        parts.append(torch.cat((recorded, torch.full((1, LAYERS, PER_TOKEN), -1))))
    return torch.cat(parts)
