"""The router and the MoE block: choices and weights by hand, groups, replay, shared expert."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from prime_rl.api import PackedBatch
from prime_rl.layers.mlp import GatedMLP
from prime_rl.layers.moe import MoEBlock, Router, RouterSettings, routes_by_layer
from prime_rl.layers.moe_torch import TorchMoE, TorchMoEConfig
from prime_rl.layers.routing import recording


def router(logits: list[float], **settings: object) -> tuple[Router, Tensor]:
    """A router that gives these logits for the returned one-token input."""
    made = Router(1, RouterSettings(experts=len(logits), **settings))  # type: ignore[arg-type]
    made.weight.data = torch.tensor(logits)[:, None]
    return made, torch.ones(1, 1)


def picks(made: Router, x_TH: Tensor, routes: list[int] | None = None) -> dict[int, float]:
    given = None if routes is None else torch.tensor([routes])
    indices, weights = made(x_TH, given)
    return dict(zip(indices[0].tolist(), weights[0].tolist(), strict=True))


SIGMOID = {"per_token": 2, "scoring": "sigmoid", "scale": 2.5, "has_selection_bias": True}


def test_selection_bias_chooses_but_does_not_weigh() -> None:
    """BL-093: sigmoid of [1, 0, -1, 2], bias 5 on expert 2, top 2, scale 2.5."""
    made, x_TH = router([1.0, 0.0, -1.0, 2.0], **SIGMOID)
    assert made.selection_bias is not None
    made.selection_bias[2] = 5.0
    assert picks(made, x_TH) == pytest.approx({2: 0.584788, 3: 1.915212}, abs=1e-6)


def test_scale_without_normalisation() -> None:
    """BL-094."""
    made, x_TH = router([1.0, 0.0, -1.0, 2.0], normalise=False, **SIGMOID)
    assert made.selection_bias is not None
    made.selection_bias[2] = 5.0
    assert picks(made, x_TH) == pytest.approx({2: 0.672353, 3: 2.201993}, abs=1e-6)


def test_softmax_over_all_experts() -> None:
    """exp([1, 0, -1, 2]) sums to 11.475217."""
    made, x_TH = router([1.0, 0.0, -1.0, 2.0], per_token=2, normalise=False)
    assert picks(made, x_TH) == pytest.approx({3: 0.643914, 0: 0.236883}, abs=1e-6)
    made, x_TH = router([1.0, 0.0, -1.0, 2.0], per_token=2)
    assert picks(made, x_TH) == pytest.approx({3: 0.731059, 0: 0.268941}, abs=1e-6)


def test_square_root_of_softplus() -> None:
    """softplus(0) = ln 2, softplus(30) = 30."""
    made, x_TH = router([0.0, 30.0, -50.0], per_token=2, scoring="sqrt_softplus", normalise=False)
    assert picks(made, x_TH) == pytest.approx({1: 30**0.5, 0: 0.832555}, abs=1e-5)


def test_groups_are_rated_by_their_two_best() -> None:
    """Groups of 3: the first holds the best expert, the second the best pair."""
    logits = [3.0, -9.0, -9.0, 2.0, 1.9, -9.0]
    settings = {"per_token": 2, "scoring": "sigmoid", "normalise": False, "groups": 2}
    made, x_TH = router(logits, **settings)
    assert picks(made, x_TH).keys() == {3, 4}
    made, x_TH = router(logits, **{**settings, "top_groups": 2})
    assert picks(made, x_TH).keys() == {0, 3}


def test_dropped_groups_stay_out_when_scores_are_negative() -> None:
    """Choices below 0, from a negative bias, must not lose against dropped groups set to 0."""
    made, x_TH = router(
        [2.0, 1.0, 0.0, -1.0], per_token=2, scoring="sigmoid", groups=2, has_selection_bias=True
    )
    assert made.selection_bias is not None
    made.selection_bias -= 3.0
    assert picks(made, x_TH).keys() == {0, 1}


def test_router_computes_in_its_weights_dtype() -> None:
    made, _ = router([1.0, 2.0], per_token=1)
    indices, weights = made(torch.ones(1, 1, dtype=torch.bfloat16))
    assert made.weight.dtype == torch.float32 and weights.dtype == torch.float32
    made.weight.data = made.weight.data.bfloat16()
    indices, weights = made(torch.ones(1, 1))
    assert indices.tolist() == [[1]] and weights.dtype == torch.float32


def test_replay_uses_recorded_experts_and_live_weights() -> None:
    """BL-087: -1 routes normally; weights come from the scores now, with gradient."""
    made, x_TH = router([1.0, 0.0, -1.0, 2.0], per_token=2)
    assert picks(made, x_TH, [-1, -1]) == picks(made, x_TH)
    replayed = picks(made, x_TH, [2, 1])
    assert replayed == pytest.approx({2: 0.268941, 1: 0.731059}, abs=1e-6)
    _, weights = made(x_TH, torch.tensor([[2, 1]]))
    weights[0, 0].backward()
    gradient = made.weight.grad
    assert gradient is not None
    assert gradient[2, 0] == pytest.approx(0.268941 * 0.731059, abs=1e-6)
    assert abs(gradient[3, 0]) < 1e-6  # the sum over all experts cancels in the ratio


def block(layer: int = 0, **changes: object) -> MoEBlock:
    settings = RouterSettings(experts=4, per_token=2)
    backend = TorchMoE(TorchMoEConfig())
    made = MoEBlock(6, 5, settings, layer, backend, **changes)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        parameter.data.normal_(generator=generator)
    return made


def slow_block(made: MoEBlock, x_TH: Tensor) -> Tensor:
    """Token by token, from the definition."""
    rows = []
    for x_H in x_TH:
        scores = (made.router.weight @ x_H).softmax(-1)
        best = scores.topk(2).indices.tolist()
        row = torch.zeros(6)
        for expert in best:
            gate, up = (made.experts.gate_up[expert] @ x_H).chunk(2)
            hidden = made.experts.down[expert] @ (nn.functional.silu(gate) * up)
            row = row + scores[expert] / scores[best].sum() * hidden
        rows.append(row)
    return torch.stack(rows)


def test_block_with_and_without_shared_expert() -> None:
    x_TH = torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    plain = block()
    assert torch.allclose(plain(x_TH), slow_block(plain, x_TH), atol=1e-5)
    shared = block(shared=GatedMLP(6, 3))
    assert shared.shared is not None
    expected = slow_block(shared, x_TH) + shared.shared(x_TH)
    assert torch.allclose(shared(x_TH), expected, atol=1e-5)
    gated = block(shared=GatedMLP(6, 3), shared_gate=True)
    assert gated.shared is not None and gated.shared_gate is not None
    gate_T1 = torch.sigmoid(x_TH @ gated.shared_gate.weight.T)
    expected = slow_block(gated, x_TH) + gate_T1 * gated.shared(x_TH)
    assert torch.allclose(gated(x_TH), expected, atol=1e-5)


def test_blocks_record_under_their_own_layer() -> None:
    """BL-086: dense layers in front do not shift the numbers."""
    x_TH = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    first, second = block(1), block(2)
    with recording() as record:
        first(x_TH)
        second(x_TH)
    routes = record.stacked(3)
    assert routes is not None and routes.shape == (5, 3, 2)
    assert (routes[:, 0] == -1).all() and (routes[:, 1:] >= 0).all()
    batch = PackedBatch.from_documents([[1, 2], [3, 4, 5]])
    by_layer = routes_by_layer(replace(batch, routed_experts=routes), 3, 2)
    for made, number in ((first, 1), (second, 2)):
        assert torch.allclose(made(x_TH, by_layer[number]), made(x_TH), atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 2, 2), (5, 3, 1), (4, 3, 2)])
def test_routes_of_another_model_are_refused(shape: tuple[int, ...]) -> None:
    batch = PackedBatch.from_documents([[1, 2], [3, 4, 5]])
    routes = torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"expected \[5, 3, 2\]"):
        routes_by_layer(replace(batch, routed_experts=routes), 3, 2)
    assert routes_by_layer(batch, 3, 2) == [None] * 3
