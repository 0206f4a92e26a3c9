"""Nemotron-H behind the embedded engine, which recomputes whole sequences: kit and mismatch."""

from dataclasses import replace
from typing import Any

import nemotron_h_cases as cases
import pytest
import torch

from prime_rl.api import PackedBatch
from prime_rl.models.head import head_weight
from prime_rl.testing.engine import PROMPT, EngineConformance, experts_of, logprobs_of
from prime_rl.trainer.logprobs import token_logprobs
from prime_rl.trainer.loss import mismatch_kl

LAYERS, PER_TOKEN, NEW_TOKENS = 6, 3, 24
STARTS = (2, 5, 8)


def replayed(choices: list[dict[str, Any]]) -> torch.Tensor:
    """int64 [T, layers, k]: what the engine recorded; the last token of a text routes normally."""
    parts = []
    for choice in choices:
        recorded = torch.tensor(experts_of(choice)).long()
        assert recorded.shape[1:] == (LAYERS, PER_TOKEN)
        is_moe = torch.tensor([symbol == "E" for symbol in cases.SIZES["hybrid_override_pattern"]])
        assert (recorded[:, ~is_moe] == 255).all() and (recorded[:, is_moe] < 8).all()
        unset = torch.full((1, LAYERS, PER_TOKEN), -1)
        parts.append(torch.cat((recorded.masked_fill(recorded == 255, -1), unset)))
    return torch.cat(parts)


class TestNemotronHServed(EngineConformance):
    plugin_name = "embedded"
    arguments = ("--return-routed-experts", "--return-sampling-mask")
    architecture = {
        "model_type": "nemotron_h",
        **{name: value for name, value in cases.SIZES.items() if name != "vocab_size"},
        "initializer_range": 0.2,  # distributions far from uniform
    }

    @pytest.mark.parametrize("is_replayed", [False, True])
    def test_mismatch_with_the_trainer(self, engine: Any, is_replayed: bool) -> None:
        """All texts packed as the trainer packs them, its own scoring, its own mismatch KL."""
        choices = [
            engine.client.generate(
                PROMPT[:start], max_tokens=NEW_TOKENS, seed=start, ignore_eos=True
            )
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
        predicting, served = [], []
        for start, first, choice in zip(STARTS, batch.cu_seqlens.tolist(), choices, strict=False):
            predicting += range(first + start - 1, first + start - 1 + NEW_TOKENS)
            served += logprobs_of(choice)
        rows = torch.tensor(predicting)
        own, _ = token_logprobs(
            hidden[rows], head_weight(module), batch.input_ids[rows + 1], torch.ones(len(rows))
        )
        assert len(set(batch.input_ids[rows + 1].tolist())) > 10
        assert mismatch_kl(own, torch.tensor(served)).mean() <= 1e-9

    def test_replay_follows_the_engine(self, engine: Any) -> None:
        """Other experts than the router's own change what the trainer computes."""
        choice = engine.client.generate(PROMPT, max_tokens=NEW_TOKENS, seed=4, ignore_eos=True)
        routes = replayed([choice])
        batch = PackedBatch.from_documents([PROMPT + choice["token_ids"]])
        with torch.no_grad():
            normal = engine.first.module(batch)
            same = engine.first.module(replace(batch, routed_experts=routes))
            others = torch.where(routes >= 0, (routes + 1) % 8, routes)
            different = engine.first.module(replace(batch, routed_experts=others))
        assert (same - normal).abs().max() <= 1e-5 * normal.abs().max()
        assert (different - normal).abs().max() > 1e-2 * normal.abs().max()
