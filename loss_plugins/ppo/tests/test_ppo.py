"""PPO against its closed form, and on the numbers that break importance ratios."""

from __future__ import annotations

import math

import pytest
import torch
from prime_rl_loss_ppo import PPO
from prime_rl_loss_ppo.config import PPOConfig
from pydantic import ValidationError

from prime_rl.api import LossInputs
from prime_rl.testing.loss import LossConformance


class TestPPO(LossConformance):
    """The kit of its kind."""

    plugin_name = "ppo"


def run(lt, li, advantages, **settings):
    """(output, gradient of the summed loss) with the given log-probabilities."""
    trainer = torch.tensor(lt, dtype=torch.float32, requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.tensor(li, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        segment_ids=torch.zeros(len(lt), dtype=torch.int64),
    )
    output = PPO(PPOConfig(**settings)).compute(inputs)
    output.loss.sum().backward()
    return output, trainer.grad


def test_values_and_gradients_equal_the_closed_form():
    """-min(A r, A clip(r)) with the band [0.8, 1.2], every side of it and both signs.

    r = 1.5:  A = 2: min(3, 2.4) = 2.4, clipped, no gradient;  A = -2: min(-3, -2.4) = -3
    r = 0.5:  A = 2: min(1, 1.6) = 1;     A = -2: min(-1, -1.6) = -1.6, clipped, no gradient
    r = 1.1:  both equal: A r
    """
    cases = [
        (1.5, 2.0, -2.4, 0.0),
        (1.5, -2.0, 3.0, 3.0),
        (0.5, 2.0, -1.0, -1.0),
        (0.5, -2.0, 1.6, 0.0),
        (1.1, 2.0, -2.2, -2.2),
        (1.1, -2.0, 2.2, 2.2),
    ]
    ratios, advantages, losses, gradients = zip(*cases, strict=True)
    output, gradient = run([math.log(r) - 2 for r in ratios], [-2.0] * 6, advantages)
    torch.testing.assert_close(output.loss, torch.tensor(losses), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.tensor(gradients), rtol=1e-5, atol=0)
    assert output.metrics["is_clipped"].tolist() == [g == 0.0 for g in gradients]
    assert output.metrics["ratio_capped"].tolist() == [False] * 6
    assert output.keep is None


def test_bounds_are_settings():
    """Band [0.5, 2], A = 1 at r = 4: -2; A = -1 at r = 0.25: 0.5."""
    lt = [math.log(4) - 2, math.log(0.25) - 2]
    output, gradient = run(lt, [-2.0] * 2, [1.0, -1.0], ratio_low=0.5, ratio_high=2.0)
    torch.testing.assert_close(output.loss, torch.tensor([-2.0, 0.5]), rtol=1e-5, atol=0)
    assert gradient.tolist() == [0.0, 0.0]


def test_on_policy_the_gradient_is_the_policy_gradient():
    output, gradient = run([-0.5, -3.0], [-0.5, -3.0], [1.5, -0.5])
    assert output.loss.tolist() == [-1.5, 0.5] and gradient.tolist() == [-1.5, 0.5]


def test_lower_bound_zero_is_off():
    """A = -1 at r = e^-5: no clip, loss and gradient r."""
    output, gradient = run([-6.0], [-1.0], [-1.0], ratio_low=0.0)
    torch.testing.assert_close(output.loss, torch.tensor([math.exp(-5)]), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.tensor([math.exp(-5)]), rtol=1e-5, atol=0)
    assert output.metrics["is_clipped"].tolist() == [False]


def test_ratio_stops_at_the_cap_and_its_gradient_stays():
    """exp(89) overflows float32; with a negative advantage the unclipped side counts: 1e4."""
    output, gradient = run([-2.0, -2.0, -2.0], [-91.0, -11.0, -91.0], [-1.0, -1.0, 1.0])
    expected = [1e4, math.exp(9), -1.2]
    torch.testing.assert_close(output.loss, torch.tensor(expected), rtol=1e-5, atol=0)
    expected_gradient = torch.tensor([1e4, math.exp(9), 0.0])
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=0)
    assert output.metrics["ratio_capped"].tolist() == [True, False, True]
    assert output.metrics["is_clipped"].tolist() == [False, False, True]


def test_a_bound_below_the_band_is_refused():
    with pytest.raises(ValidationError, match="max_importance_ratio 2 is below ratio_high 3"):
        PPOConfig(ratio_high=3.0, max_importance_ratio=2.0)


def test_a_bound_at_the_edge_of_the_band_is_refused():
    """There the smaller of two equal terms has half the gradient of each."""
    with pytest.raises(ValidationError, match="2 is equal to ratio_high 2, expected a larger one"):
        PPOConfig(ratio_high=2.0, max_importance_ratio=2.0)


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
        {"max_importance_ratio": 1e30},
        {"ratio_high": True},
        {"adv_tau": 1.0},
        {"max_importance_ratio": 0.5},
    ],
)
def test_removed_and_unusable_settings_are_refused(setting):
    with pytest.raises(ValidationError):
        PPOConfig(**setting)
