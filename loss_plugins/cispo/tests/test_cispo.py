"""CISPO against its closed form, and on the numbers that break importance ratios."""

from __future__ import annotations

import math

import pytest
import torch
from prime_rl_loss_cispo import CISPO
from prime_rl_loss_cispo.config import CISPOConfig
from pydantic import ValidationError

from prime_rl.api import LossInputs
from prime_rl.testing.loss import LossConformance


class TestCISPO(LossConformance):
    """The kit of its kind."""

    plugin_name = "cispo"


def run(lt, li, advantages, **settings):
    """(output, gradient of the summed loss) with the given log-probabilities."""
    trainer = torch.tensor(lt, dtype=torch.float32, requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.tensor(li, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        segment_ids=torch.zeros(len(lt), dtype=torch.int64),
    )
    output = CISPO(CISPOConfig(**settings)).compute(inputs)
    output.loss.sum().backward()
    return output, trainer.grad


def test_values_and_gradients_equal_the_closed_form():
    """-clip(r, 0, 5) * A * lt with the gradient -clip(r, 0, 5) * A.

    r = 6: weight 5; r = 4: 4; r = 0.25: 0.25 (no lower bound); lt = log(r) - 3
    """
    cases = [(6.0, 2.0, 5.0), (6.0, -2.0, 5.0), (4.0, 1.0, 4.0), (0.25, 1.0, 0.25)]
    ratios, advantages, weights = zip(*cases, strict=True)
    lt = [math.log(r) - 3 for r in ratios]
    output, gradient = run(lt, [-3.0] * 4, advantages)
    slopes = [-w * a for w, a in zip(weights, advantages, strict=True)]
    losses = torch.tensor([slope * t for slope, t in zip(slopes, lt, strict=True)])
    torch.testing.assert_close(output.loss, losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.tensor(slopes), rtol=1e-5, atol=0)
    assert output.metrics["is_clipped"].tolist() == [True, True, False, False]
    assert output.keep is None


def test_lower_bound_raises_small_weights():
    """Band [0.5, 2]: r = 0.25 weighs 0.5, r = 4 weighs 2, r = 1 stays."""
    lt = [math.log(0.25) - 2, math.log(4) - 2, -2.0]
    output, gradient = run(lt, [-2.0] * 3, [1.0] * 3, ratio_low=0.5, ratio_high=2.0)
    torch.testing.assert_close(gradient, torch.tensor([-0.5, -2.0, -1.0]), rtol=1e-5, atol=0)
    assert output.metrics["is_clipped"].tolist() == [True, True, False]


def test_clipped_tokens_keep_their_gradient():
    """exp(89) overflows float32: the weight is 5, and so is the gradient."""
    output, gradient = run([-2.0, -2.0], [-91.0, -91.0], [1.0, -1.0])
    torch.testing.assert_close(output.loss, torch.tensor([10.0, -10.0]), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.tensor([-5.0, 5.0]), rtol=1e-5, atol=0)


def test_no_gradient_flows_through_the_weight():
    """At lt = 0 the loss is 0 and the gradient -r * A; through the weight it would be more."""
    output, gradient = run([-1.0, 0.0], [-1.5, 0.0], [1.0, 1.0])
    torch.testing.assert_close(gradient, torch.tensor([-math.exp(0.5), -1.0]), rtol=1e-5, atol=0)
    assert output.loss[1].item() == 0.0


@pytest.mark.parametrize("gap", [88.0, 89.0, 200.0, 1e3, 1e4])
@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_finite_for_any_gap(gap, advantage):
    base = [-2.0, -2.0 - gap, -1e-6, -1e-6 - gap]
    other = [-2.0 - gap, -2.0, -1e-6 - gap, -1e-6]
    output, gradient = run(base, other, [advantage] * 4)
    for stream in (output.loss, gradient, *output.metrics.values()):
        assert torch.isfinite(stream.float()).all()
    if advantage == 0:
        assert output.loss.abs().sum() == 0 and gradient.abs().sum() == 0


def test_no_tokens():
    output, gradient = run([], [], [])
    assert output.loss.shape == (0,) and gradient.shape == (0,)


@pytest.mark.parametrize(
    "setting",
    [
        {"kl_tau": 1e-3},
        {"dppo_mask_low": 0.2},
        {"ratio_low": -0.1},
        {"ratio_low": 1.1},
        {"ratio_high": 0.9},
        {"ratio_high": float("inf")},
        {"ratio_high": 1e30},
        {"ratio_high": True},
        {"adv_tau": 1.0},
        {"max_importance_ratio": 1e4},
    ],
)
def test_removed_and_unusable_settings_are_refused(setting):
    with pytest.raises(ValidationError):
        CISPOConfig(**setting)
