"""The embedded engine with real model plugins: the kit of its kind on both paths, and experts."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest

from prime_rl.api import PackedBatch
from prime_rl.layers.routing import recording
from prime_rl.testing.engine import PROMPT, EngineConformance, experts_of, logprobs_of

DENSE = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": False,
}
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
    "tie_word_embeddings": True,
}


class TestEmbedded(EngineConformance):
    """Qwen3 with its decode cache."""

    plugin_name = "embedded"
    architecture = DENSE


class TestEmbeddedMoE(EngineConformance):
    """Qwen3 with experts, routed experts and sampling masks returned."""

    plugin_name = "embedded"
    architecture = MOE
    arguments = ("--return-routed-experts", "--return-sampling-mask")

    def test_experts_are_the_modules_own(self, engine) -> None:
        choice = engine.client.generate(PROMPT, max_tokens=9, seed=1, ignore_eos=True)
        tokens = PROMPT + choice["token_ids"]
        with recording() as record:
            engine.first.module(PackedBatch.from_documents([tokens[:-1]]))
        own = record.stacked(3).numpy()
        served = experts_of(choice)
        assert served.shape == (len(tokens) - 1, 3, 2)
        assert (served[:, 0] == 255).all()  # the first layer is dense
        assert (numpy.sort(served[:, 1:]) == numpy.sort(own[:, 1:])).all()

    def test_later_turns_ask_for_the_rest_only(self, engine) -> None:
        whole = engine.client.generate(PROMPT, max_tokens=4, seed=2, ignore_eos=True)
        later = engine.client.generate(
            PROMPT, max_tokens=4, seed=2, ignore_eos=True, routed_experts_prompt_start=5
        )
        assert later["routed_experts"]["start"] == 5
        assert (experts_of(later) == experts_of(whole)[5:]).all()

    def test_scores_over_the_recorded_candidates_are_the_served_ones(self, engine) -> None:
        choice = engine.client.generate(
            PROMPT, max_tokens=12, seed=3, top_p=0.7, temperature=0.8, ignore_eos=True
        )
        tokens = PROMPT + choice["token_ids"]
        scores = engine.first.scores(tokens, 0.8)
        for place, (kept, served) in enumerate(
            zip(choice["sampling_mask"], logprobs_of(choice), strict=True)
        ):
            row = scores[len(PROMPT) + place - 1]
            token = choice["token_ids"][place]
            assert token in kept
            inside = row[kept].log_softmax(0)[kept.index(token)]
            assert float(inside) == pytest.approx(served, abs=2e-5)


def test_values_that_are_no_numbers_do_not_outlive_their_sequences(tmp_path) -> None:
    """Broken weights, long sequences, then good weights: cache places that short sequences do not
    fill still hold NaN, and a mask does not stop it."""
    kit = TestEmbedded()
    with kit.serve(tmp_path) as served:
        broken = kit.make_reference(tmp_path / "broken", 3)
        for parameter in broken.module.parameters():
            parameter.data.fill_(float("nan"))
        served.update(broken)
        body = {"token_ids": [1] * 100, "sampling_params": {"max_tokens": 2}}
        answer = served.client.http.post("/inference/v1/generate", json=body)
        assert answer.status_code == 500
        assert "log-probability of nan" in answer.json()["error"]["message"]
        served.update(served.first)
        with ThreadPoolExecutor(4) as pool:
            prompts = [PROMPT, [1] * 90, PROMPT[:3], [2] * 80]
            choices = pool.map(
                lambda prompt: served.client.generate(prompt, max_tokens=20, ignore_eos=True),
                prompts,
            )
            for prompt, choice in zip(prompts, choices, strict=True):
                kit.check_scores(served.first, prompt + choice["token_ids"], logprobs_of(choice))
