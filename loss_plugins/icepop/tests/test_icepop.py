"""IcePop against its closed form, and on the numbers that break importance ratios."""

from __future__ import annotations

import math

import pytest
import torch
from prime_rl_loss_icepop import IcePop
from prime_rl_loss_icepop.config import IcePopConfig
from pydantic import ValidationError

from prime_rl.api import LossInputs
from prime_rl.testing.loss import LossConformance


class TestIcePop(LossConformance):
    """The kit of its kind."""

    plugin_name = "icepop"


def run(lt, li, advantages, **settings):
    """(output, gradient of the summed loss) with the given log-probabilities."""
    trainer = torch.tensor(lt, dtype=torch.float32, requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.tensor(li, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        segment_ids=torch.zeros(len(lt), dtype=torch.int64),
    )
    output = IcePop(IcePopConfig(**settings)).compute(inputs)
    output.loss.sum().backward()
    return output, trainer.grad


def test_values_and_gradients_equal_the_closed_form():
    """Ratios e^0.2, 1, e^-0.2, e^-0.5, all inside [0.2, 5]; the gradient of r is r."""
    lt, li, advantages = [-0.5, -1.0, -2.0, -3.0], [-0.7, -1.0, -1.8, -2.5], [1.0, -2.0, 0.5, 3.0]
    output, gradient = run(lt, li, advantages, adv_tau=0.5)
    ratios = [math.exp(0.2), 1.0, math.exp(-0.2), math.exp(-0.5)]
    expected = torch.tensor([-0.5 * a * r for r, a in zip(ratios, advantages, strict=True)])
    assert all(output.keep)
    torch.testing.assert_close(output.loss, expected)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_outside_the_band_is_dropped_not_clipped(sign):
    """Ratios 6, 1/6, 4, 1/4 against [0.2, 5], whatever A's sign."""
    ratios = [6.0, 1 / 6, 4.0, 0.25]
    output, gradient = run([math.log(r) - 3 for r in ratios], [-3.0] * 4, [sign] * 4)
    assert output.keep.tolist() == [False, False, True, True]
    assert output.metrics["is_masked"].tolist() == [True, True, False, False]
    expected = -sign * torch.tensor([0.0, 0.0, 4.0, 0.25])
    torch.testing.assert_close(output.loss, expected, rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=0)
    assert output.loss[:2].tolist() == [0.0, 0.0] == gradient[:2].abs().tolist()


def test_the_bounds_belong_to_the_band():
    """The float32 neighbours of log 5 and log 0.2: the bound is in, the next number out."""
    high, low = torch.tensor(math.log(5.0)), torch.tensor(math.log(0.2))
    inf = torch.tensor(math.inf)
    beyond, below = torch.nextafter(high, inf), torch.nextafter(low, -inf)
    lt = [high.item(), beyond.item(), low.item(), below.item()]
    output, _ = run(lt, [0.0] * 4, [1.0] * 4)
    assert output.keep.tolist() == [True, False, True, False]


def test_a_band_of_one_point_keeps_what_did_not_move():
    output, gradient = run([-1.0, -1.0], [-1.0, -1.001], [1.0, 1.0], ratio_low=1.0, ratio_high=1.0)
    assert output.keep.tolist() == [True, False]
    assert output.loss.tolist() == [-1.0, 0.0] and gradient.tolist() == [-1.0, 0.0]


def test_lower_bound_zero_is_off():
    output, gradient = run([-1e4, -1.0], [0.0, -1.0], [1.0, 1.0], ratio_low=0.0)
    assert output.keep.tolist() == [True, True]
    assert output.loss.tolist() == [0.0, -1.0] and gradient.tolist() == [0.0, -1.0]


def test_infinite_ratios_are_selected_away_not_multiplied():
    """Log ratios 1000 and 0, band [0.5, 5]: mean loss -0.5, gradient [0, -0.5]."""
    output, gradient = run([0.0, -1.0], [-1000.0, -1.0], [1.0, 1.0], ratio_low=0.5)
    assert output.loss.mean().item() == -0.5
    assert (gradient / 2).tolist() == [0.0, -0.5]


def test_mismatch_is_split_by_the_mask():
    output, _ = run([math.log(4) - 3, math.log(6) - 3], [-3.0, -3.0], [1.0, 1.0])
    kept, masked = 4 - 1 - math.log(4), 6 - 1 - math.log(6)
    torch.testing.assert_close(
        output.metrics["unmasked_mismatch_kl"], torch.tensor([kept, 0.0]), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        output.metrics["masked_mismatch_kl"], torch.tensor([0.0, masked]), rtol=1e-5, atol=0
    )


def test_the_widest_band_stays_finite():
    output, gradient = run([0.0, 0.0], [-13.8, -13.9], [1e6, 1e6], ratio_high=1e6, adv_tau=1e6)
    assert output.keep.tolist() == [True, False]
    assert torch.isfinite(output.loss).all() and torch.isfinite(gradient).all()


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
        {"adv_tau": 1e300},
        {"ratio_high": True},
        {"ipo_threshold": 0.1},
        {"dppo_mask_high": 0.2},
        {"adv_tau": 0.0},
        {"max_importance_ratio": 1e4},
    ],
)
def test_removed_and_unusable_settings_are_refused(setting):
    with pytest.raises(ValidationError):
        IcePopConfig(**setting)
