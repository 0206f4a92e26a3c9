"""Qwen3.8 behind the embedded engine, which recomputes whole sequences: engine kit and mismatch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from prime_rl.api import PackedBatch
from prime_rl.models.head import head_weight
from prime_rl.testing.engine import PROMPT, EngineConformance, experts_of, logprobs_of
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loss import mismatch_kl

LAYERS, PER_TOKEN = 3, 2


class TestQwen38Served(EngineConformance):
    plugin_name = "embedded"
    arguments = ("--return-routed-experts", "--return-sampling-mask")
    architecture = {
        "model_type": "qwen4_exp_text",
        "hidden_size": 32,
        "num_hidden_layers": LAYERS,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
        },
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "output_gate_type": "sigmoid",
        "num_experts": 6,
        "num_experts_per_tok": PER_TOKEN,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 16,
        "hc_count": 4,
        "hc_lowrank": 6,
        "ple_layer_ids": [1],
        "ple_embed_dim": 16,
        "heads_per_ngram": 2,
        "ngram_vocab_size_base": 100,
        "split_ngram_parts": 2,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
        "eos_token_id": 2,
        "initializer_range": 0.2,  # distributions far from uniform
    }

    @pytest.mark.parametrize("is_replayed", [False, True])
    def test_mismatch_with_the_trainer(self, engine, is_replayed: bool) -> None:
        """All texts packed as the trainer packs them, its own scoring, its own mismatch KL."""
        starts = (2, 5, 8)
        choices = [
            engine.client.generate(PROMPT[:start], max_tokens=24, seed=start, ignore_eos=True)
            for start in starts
        ]
        texts = [
            PROMPT[:start] + choice["token_ids"]
            for start, choice in zip(starts, choices, strict=True)
        ]
        batch = PackedBatch.from_documents(texts)
        if is_replayed:
            batch = replace(batch, routed_experts=replayed(choices))
        module = engine.first.module
        with torch.no_grad():
            hidden = module(batch)
        predicting, served = [], []
        for start, first, choice in zip(starts, batch.cu_seqlens.tolist(), choices, strict=False):
            predicting += range(first + start - 1, first + start - 1 + 24)
            served += logprobs_of(choice)
        rows = torch.tensor(predicting)
        own, _ = token_logprobs(
            hidden[rows], head_weight(module), batch.input_ids[rows + 1], torch.ones(len(rows))
        )
        assert len(set(batch.input_ids[rows + 1].tolist())) > 10
        assert mismatch_kl(own, torch.tensor(served)).mean() <= 1e-9

    def test_replay_follows_the_engine(self, engine) -> None:
        """Other experts than the router's own change what the trainer computes."""
        choice = engine.client.generate(PROMPT, max_tokens=24, seed=4, ignore_eos=True)
        routes = replayed([choice])
        batch = PackedBatch.from_documents([PROMPT + choice["token_ids"]])
        with torch.no_grad():
            normal = engine.first.module(batch)
            same = engine.first.module(replace(batch, routed_experts=routes))
            others = torch.where(routes >= 0, (routes + 1) % 6, routes)
            different = engine.first.module(replace(batch, routed_experts=others))
        assert (same - normal).abs().max() <= 1e-5 * normal.abs().max()
        assert (different - normal).abs().max() > 1e-2 * normal.abs().max()


def replayed(choices: list[dict]) -> torch.Tensor:
    """int64 [T, layers, k]: what the engine recorded; the last token of a text routes normally."""
    parts = []
    for choice in choices:
        recorded = torch.tensor(experts_of(choice)).long()
        assert recorded.shape[1:] == (LAYERS, PER_TOKEN) and recorded.max() < 6
        parts.append(torch.cat((recorded, torch.full((1, LAYERS, PER_TOKEN), -1))))
    return torch.cat(parts)
