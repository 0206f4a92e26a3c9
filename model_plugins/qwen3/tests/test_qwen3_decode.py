"""The decode cache step by step: sizes change, weights change, dtypes, misuse."""

import warnings
from typing import Any

import pytest
import torch
from prime_rl_model_qwen3 import Qwen3, Qwen3MoE
from prime_rl_model_qwen3.decode import Qwen3Decoder
from prime_rl_model_qwen3.decode_step import LARGEST_HEAD_PRODUCT, LARGEST_ROW_PRODUCT

from prime_rl.api import DecodeRequest, Kernels, PackedBatch
from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.layers.routing import recording

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
}
EXPERTS = {
    **DENSE,
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [1],
}


def made(
    config: dict[str, Any], dtype: torch.dtype = torch.float32, positions: int = 70
) -> tuple[Any, Qwen3Decoder]:
    """A module with random weights and a decoder of 4 slots."""
    plugin = (Qwen3MoE if config["model_type"] == "qwen3_moe" else Qwen3)(
        Qwen3.Config() if config["model_type"] == "qwen3" else Qwen3MoE.Config()
    )
    architecture = plugin.architecture(config)
    moe = [TorchMoE(TorchMoEConfig())] * architecture.num_layers
    module = plugin.build(architecture, Kernels(TorchAttention(TorchAttentionConfig()), moe))
    plugin.initialise(module, torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.2).add_(0.01)
    module = module.to(dtype)
    decoder = plugin.decoder(module, architecture, 4, positions)
    assert isinstance(decoder, Qwen3Decoder)
    return module, decoder


@torch.no_grad()
def packed(module: Any, texts: list[list[int]]) -> torch.Tensor:
    batch = PackedBatch.from_documents(texts)
    return module(batch)[batch.cu_seqlens[1:].long() - 1]


@pytest.mark.parametrize(
    "config",
    [
        DENSE,
        {**DENSE, "attention_bias": True},
        {**DENSE, "num_key_value_heads": 4},
        {**DENSE, "num_key_value_heads": 1, "tie_word_embeddings": True},
        EXPERTS,
        {**EXPERTS, "attention_bias": True},
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequences_join_and_leave(config: dict[str, Any], dtype: torch.dtype) -> None:
    """1, then 3, then 2, then 4 sequences of different lengths, token by token and in larger
    pieces, in slot order (the step in fixed buffers) and not, against the packed forward."""
    module, decoder = made(config, dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 0.03  # of the norm
    texts = {slot: [(7 * slot + i) % 96 for i in range(3 + 2 * slot)] for slot in range(4)}
    cached = dict.fromkeys(texts, 0)
    plan = [[0]] * 3 + [[0, 1, 2]] * 3 + [[2, 0]] * 2 + [[3]] + [[0, 1]] * 2 + [[0, 1, 2, 3]] * 3
    for step, slots in enumerate(plan):
        for slot in slots:
            texts[slot] = [*texts[slot], (5 * step + slot) % 96]
        requests = [DecodeRequest(s, cached[s], texts[s][cached[s] :]) for s in slots]
        found = decoder.forward(requests).float()
        expected = packed(module, [texts[slot] for slot in slots]).float()
        assert (found - expected).norm() <= tolerance * expected.norm(), (step, slots)
        cached.update((slot, len(texts[slot])) for slot in slots)


@pytest.mark.parametrize("slots", [[0], [0, 1], [0, 1, 2]])
def test_to_the_last_position(slots: list[int]) -> None:
    """Past every block of positions that is read at once; slots of equal and unequal lengths."""
    module, decoder = made(DENSE)
    texts = {
        slot: [(slot + i) % 96 for i in range(3 if len(slots) == 2 else 3 - slot)] for slot in slots
    }
    decoder.forward([DecodeRequest(slot, 0, texts[slot]) for slot in slots])
    while max(map(len, texts.values())) < 70:
        for slot in slots:
            texts[slot].append((11 * len(texts[slot]) + slot) % 96)
        requests = [DecodeRequest(s, len(texts[s]) - 1, texts[s][-1:]) for s in slots]
        found, expected = decoder.forward(requests), packed(module, list(texts.values()))
        assert (found - expected).norm() <= 1e-5 * expected.norm(), len(texts[0])


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
def test_new_weights_after_a_step_in_fixed_buffers(config: dict[str, Any]) -> None:
    module, decoder = made(config)
    text = [3, 1, 4, 1, 5]
    for slot in (0, 1):
        decoder.forward([DecodeRequest(slot, 0, text)])
    decoder.forward([DecodeRequest(slot, 5, [9]) for slot in (0, 1)])
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(-0.7)
    decoder.forget()
    decoder.forward([DecodeRequest(slot, 0, text) for slot in (0, 1)])
    found = decoder.forward([DecodeRequest(slot, 5, [9]) for slot in (0, 1)])
    expected = packed(module, [[*text, 9]])
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("config", [DENSE, EXPERTS])
@pytest.mark.parametrize("slots", [1, 3])
def test_large_weights(config: dict[str, Any], slots: int) -> None:
    """Scores and gates whose exponentials alone overflow float32, and no warning about them."""
    module, decoder = made(config)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.mul_(6.0)
            elif name.endswith("mlp.gate_up.weight"):
                parameter.mul_(300.0)
    texts = [[(11 * slot + i) % 96 for i in range(9)] for slot in range(slots)]
    decoder.forward([DecodeRequest(slot, 0, text[:-1]) for slot, text in enumerate(texts)])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = decoder.forward([DecodeRequest(s, 8, text[-1:]) for s, text in enumerate(texts)])
    expected = packed(module, texts)
    assert decoder.step is not None and not decoder.step.layers[0].has_small_scores
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("slots", [1, 2])
def test_beyond_the_sizes_that_numpy_multiplies(slots: int) -> None:
    config = {**DENSE, "intermediate_size": LARGEST_ROW_PRODUCT // 64}
    module, decoder = made(config, positions=400)
    length = LARGEST_HEAD_PRODUCT // (2 * 32) + 20
    texts = [[(13 * slot + 5 * i) % 96 for i in range(length - slot)] for slot in range(slots)]
    decoder.forward([DecodeRequest(slot, 0, text[:-1]) for slot, text in enumerate(texts)])
    found = decoder.forward(
        [DecodeRequest(slot, len(text) - 1, text[-1:]) for slot, text in enumerate(texts)]
    )
    expected = packed(module, texts)
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_results_outlive_the_next_step() -> None:
    _, decoder = made(DENSE)
    first = decoder.forward([DecodeRequest(0, 0, [1])])
    kept = first.clone()
    decoder.forward([DecodeRequest(0, 1, [2])])
    assert first.equal(kept)


def test_experts_are_recorded_in_request_order() -> None:
    """As the packed forward of the same texts records them, for new and single tokens at once."""
    module, decoder = made(EXPERTS)
    decoder.forward([DecodeRequest(2, 0, [1, 2, 3])])
    with recording() as ours:
        decoder.forward([DecodeRequest(2, 3, [4]), DecodeRequest(0, 0, [5, 6])])
    with recording() as theirs, torch.no_grad():
        module(PackedBatch.from_documents([[1, 2, 3, 4], [5, 6]]))
    found, expected = ours.stacked(3), theirs.stacked(3)
    assert found is not None and expected is not None
    assert found.sort(-1).values.equal(expected[3:].sort(-1).values)


@pytest.mark.parametrize(
    "requests",
    [
        [DecodeRequest(4, 0, [1])],
        [DecodeRequest(-1, 0, [1])],
        [DecodeRequest(0, 70, [1])],
        [DecodeRequest(0, 66, [1, 2, 3, 4, 5])],
        [DecodeRequest(0, -1, [1])],
        [DecodeRequest(0, 0, [])],
        [DecodeRequest(1, 0, [1]), DecodeRequest(1, 1, [1])],
        [DecodeRequest(slot, 0, [1]) for slot in range(5)],
    ],
)
def test_requests_that_do_not_fit_are_refused(requests: list[DecodeRequest]) -> None:
    _, decoder = made(DENSE)
    with pytest.raises(ValueError, match="slot|position"):
        decoder.forward(requests)
