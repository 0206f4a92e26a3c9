"""Each part of GLM-5 against its formula, written out number by number in float64."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from prime_rl_model_glm5.indexer import Visible
from torch import Tensor

from prime_rl.api import PackedBatch
from prime_rl.layers.rotary import rotate_pairs

Numbers = list[float]
LENGTHS = (3, 1, 14)


@pytest.fixture
def module(checkpoint: Path, make_ours: Any) -> Any:
    return make_ours(checkpoint)[1]


@pytest.fixture
def setting(module: Any) -> tuple[Tensor, Any, Visible]:
    """Random input of three documents, their rotation, and the keys each token may see."""
    batch = PackedBatch.from_documents([[0] * length for length in LENGTHS])
    x_TH = torch.randn(sum(LENGTHS), 64, generator=torch.Generator().manual_seed(2))
    first = batch.document_starts()
    visible = Visible(first, torch.arange(1, len(first) + 1))
    return x_TH, module.rotary.pairs(batch.positions, torch.float32), visible


def times(matrix: Tensor, x: Numbers) -> Numbers:
    return [sum(w * v for w, v in zip(row, x, strict=True)) for row in matrix.tolist()]


def rms(x: Numbers, weight: Tensor, eps: float = 1e-5) -> Numbers:
    inverse = (sum(v * v for v in x) / len(x) + eps) ** -0.5
    return [v * inverse * w for v, w in zip(x, weight.tolist(), strict=True)]


def layer_norm(x: Numbers, weight: Tensor, bias: Tensor) -> Numbers:
    mean = sum(x) / len(x)
    inverse = (sum((v - mean) ** 2 for v in x) / len(x) + 1e-6) ** -0.5
    pairs = zip(x, weight.tolist(), bias.tolist(), strict=True)
    return [(v - mean) * inverse * w + b for v, w, b in pairs]


def turn(x: Numbers, position: int) -> Numbers:
    """The first 8 numbers, pair by pair: (a + ib) e^(i position theta^(-2k/8))."""
    turned = list(x)
    for pair in range(4):
        angle = position * 8e6 ** (-2 * pair / 8)
        a, b = x[2 * pair], x[2 * pair + 1]
        turned[2 * pair] = a * math.cos(angle) - b * math.sin(angle)
        turned[2 * pair + 1] = b * math.cos(angle) + a * math.sin(angle)
    return turned


def dot(x: Numbers, y: Numbers) -> float:
    return sum(a * b for a, b in zip(x, y, strict=True))


def split(x: Numbers, size: int) -> list[Numbers]:
    return [x[start : start + size] for start in range(0, len(x), size)]


def slow_selection(attention: Any, x: list[Numbers], latents: list[Numbers]) -> list[set[int]]:
    """The 8 visible rows with the largest score, constant factors included."""
    indexer = attention.indexer
    queries, keys, weights = [], [], []
    positions = [position for length in LENGTHS for position in range(length)]
    for token, position in enumerate(positions):
        heads = split(times(indexer.query.weight, latents[token]), 16)
        queries.append([turn(head, position) for head in heads])
        key = times(indexer.key.weight, x[token])
        key = layer_norm(key, indexer.key_norm.weight, indexer.key_norm.bias)
        keys.append(turn(key, position))
        weights.append(times(indexer.head_weights.weight, x[token]))
    chosen = []
    for token, position in enumerate(positions):
        scores = {}
        for row in range(token - position, token + 1):
            heads = zip(weights[token], queries[token], strict=True)
            total = sum(w * max(dot(q, keys[row]), 0.0) for w, q in heads)
            scores[row] = total * 16**-0.5 * 16**-0.5
        chosen.append(set(sorted(scores, key=scores.__getitem__, reverse=True)[:8]))
    return chosen


def slow_attention(
    attention: Any, x: list[Numbers], latents: list[Numbers], rows: list[set[int]]
) -> list[Numbers]:
    """Keys and values made per head, as the definition has them, not absorbed."""
    positions = [position for length in LENGTHS for position in range(length)]
    keys: list[list[Numbers]] = []
    values: list[list[Numbers]] = []
    for token, position in enumerate(positions):
        both = times(attention.latents.weight[48:], x[token])
        latent, rotary = rms(both[:32], attention.latent_norm.weight), turn(both[32:], position)
        heads = split(times(attention.key_value.weight, latent), 12 + 16)
        keys.append([head[:12] + rotary for head in heads])
        values.append([head[12:] for head in heads])
    outputs = []
    for token, position in enumerate(positions):
        mixed: Numbers = []
        for head, query in enumerate(split(times(attention.query.weight, latents[token]), 12 + 8)):
            query = query[:12] + turn(query[12:], position)
            logits = {row: dot(query, keys[row][head]) * 20**-0.5 for row in rows[token]}
            top = max(logits.values())
            weights = {row: math.exp(logit - top) for row, logit in logits.items()}
            total = sum(weights.values())
            mixed += [
                sum(weight / total * values[row][head][i] for row, weight in weights.items())
                for i in range(16)
            ]
        outputs.append(times(attention.out.weight, mixed))
    return outputs


def query_latents(attention: Any, x: list[Numbers]) -> list[Numbers]:
    return [
        rms(times(attention.latents.weight[:48], row), attention.query_norm.weight) for row in x
    ]


@torch.no_grad()
def test_indexer_and_attention(module: Any, setting: Any) -> None:
    """A full layer: the chosen rows, then the output."""
    x_TH, rotation, visible = setting
    attention = module.layers[1].attention
    found, rows_TS = attention(x_TH, rotation, visible, None)
    x = x_TH.tolist()
    latents = query_latents(attention, x)
    expected_rows = slow_selection(attention, x, latents)
    assert [set(rows) - {-1} for rows in rows_TS.tolist()] == expected_rows
    assert sorted(len(rows) for rows in expected_rows)[-7:] == [8] * 7
    expected = torch.tensor(slow_attention(attention, x, latents, expected_rows))
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@torch.no_grad()
def test_shared_layer_takes_the_rows_it_is_given(module: Any, setting: Any) -> None:
    """Rows no indexer would choose: each token's own and its document's first."""
    x_TH, rotation, visible = setting
    attention = module.layers[2].attention
    assert attention.indexer is None
    own_T = torch.arange(len(x_TH))
    given_TS = torch.stack((own_T, torch.where(visible.first_T < own_T, visible.first_T, -1)), 1)
    found, rows_TS = attention(x_TH, rotation, visible, given_TS)
    assert rows_TS is given_TS
    x = x_TH.tolist()
    rows = [set(given) - {-1} for given in given_TS.tolist()]
    expected = torch.tensor(slow_attention(attention, x, query_latents(attention, x), rows))
    assert (found - expected).abs().max() <= 2e-6 * expected.abs().max()


@torch.no_grad()
def test_rotation_turns_the_first_dimensions_in_pairs(module: Any, setting: Any) -> None:
    _, rotation, _ = setting
    head_TD = torch.randn(18, 16, generator=torch.Generator().manual_seed(3))
    found = module.layers[0].attention.indexer._rotate(head_TD, rotation)
    positions = [position for length in LENGTHS for position in range(length)]
    expected = [turn(x, p) for x, p in zip(head_TD.tolist(), positions, strict=True)]
    assert (found - torch.tensor(expected)).abs().max() <= 1e-6
    assert found[:, 8:].equal(head_TD[:, 8:])
    assert rotate_pairs(head_TD[:, :8], rotation).equal(found[:, :8])


@torch.no_grad()
def test_experts(module: Any) -> None:
    """Chosen by biased scores, weighed by unbiased ones, plus the shared expert unscaled."""
    block = module.layers[3].mlp
    x_TH = torch.randn(6, 64, generator=torch.Generator().manual_seed(4))
    found = block(x_TH)
    bias = block.router.selection_bias.tolist()
    assert len({round(b, 6) for b in bias}) == 8
    expected = []
    for x in x_TH.tolist():
        scores = [1 / (1 + math.exp(-logit)) for logit in times(block.router.weight, x)]
        chosen = sorted(range(8), key=lambda e: scores[e] + bias[e], reverse=True)[:2]
        total = sum(scores[expert] for expert in chosen)
        out = gated(block.shared.gate_up.weight, block.shared.down.weight, x)
        for expert in chosen:
            weight = scores[expert] / total * 2.5
            part = gated(block.experts.gate_up[expert], block.experts.down[expert], x)
            out = [o + weight * p for o, p in zip(out, part, strict=True)]
        expected.append(out)
    difference = (found - torch.tensor(expected)).abs().max()
    assert difference <= 2e-6 * found.abs().max()


def gated(gate_up: Tensor, down: Tensor, x: Numbers) -> Numbers:
    both = times(gate_up, x)
    half = len(both) // 2
    inner = [g / (1 + math.exp(-g)) * u for g, u in zip(both[:half], both[half:], strict=True)]
    return times(down, inner)


@torch.no_grad()
@pytest.mark.parametrize(
    ("normalise", "weights"),
    [(True, (0.584788, 1.915212)), (False, (0.672353, 2.201993))],
)
def test_router_by_hand(
    normalise: bool, weights: tuple[float, float], tiny: Any, make_router: Any
) -> None:
    """BL-093, BL-094: logits [1, 0, -1, 2], bias 5 on expert 2, two experts, scale 2.5."""
    router = make_router({**tiny, "n_routed_experts": 4, "norm_topk_prob": normalise})
    router.weight.zero_()
    router.weight[:, 0] = torch.tensor([1.0, 0.0, -1.0, 2.0])
    router.selection_bias.copy_(torch.tensor([0.0, 0.0, 5.0, 0.0]))
    x_TH = torch.zeros(1, 64)
    x_TH[0, 0] = 1.0
    indices, found = router(x_TH)
    by_expert = dict(zip(indices[0].tolist(), found[0].tolist(), strict=True))
    assert by_expert == pytest.approx({2: weights[0], 3: weights[1]}, abs=1e-6)


@pytest.fixture
def make_router() -> Any:
    """The router of layer 2 of a config, as the plugin builds it."""
    from prime_rl_model_glm5 import Glm5

    from prime_rl.api import Kernels
    from prime_rl.layers.attention_torch import TorchAttention, TorchAttentionConfig
    from prime_rl.layers.dsa_torch import TorchDSA, TorchDSAConfig
    from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig

    def make(config: dict[str, Any]) -> Any:
        plugin = Glm5(Glm5.Config(type="glm5"))
        kernels = Kernels(
            TorchAttention(TorchAttentionConfig()),
            [TorchMoE(TorchMoEConfig())] * 6,
            TorchDSA(TorchDSAConfig()),
        )
        return plugin.build(plugin.architecture(config), kernels).layers[2].mlp.router

    return make
