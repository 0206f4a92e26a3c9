"""IPO against its closed form, and on the numbers that break importance ratios."""

from __future__ import annotations

import math

import pytest
import torch
from prime_rl_loss_ipo import IPO
from prime_rl_loss_ipo.config import IPOConfig
from pydantic import ValidationError

from prime_rl.api import LossInputs
from prime_rl.configs.load import load_run
from prime_rl.errors import ConfigError
from prime_rl.plugins import scan
from prime_rl.testing.loss import LossConformance


class TestIPO(LossConformance):
    """The kit of its kind."""

    plugin_name = "ipo"


def run(lt, li, advantages, **settings):
    """(output, gradient of the summed loss) with the given log-probabilities."""
    trainer = torch.tensor(lt, dtype=torch.float32, requires_grad=True)
    inputs = LossInputs(
        trainer_logprobs=trainer,
        inference_logprobs=torch.tensor(li, dtype=torch.float32),
        advantages=torch.tensor(advantages, dtype=torch.float32),
        segment_ids=torch.zeros(len(lt), dtype=torch.int64),
    )
    output = IPO(IPOConfig(**settings)).compute(inputs)
    output.loss.sum().backward()
    return output, trainer.grad


def test_values_and_gradients_equal_the_closed_form():
    lt, li, advantages = [-0.5, -1.0, -2.0, -3.0], [-0.7, -1.0, -1.8, -2.5], [1.0, -2.0, 0.5, 3.0]
    output, gradient = run(lt, li, advantages, adv_tau=0.5)
    expected = [-0.5 * a * math.exp(t - i) for t, i, a in zip(lt, li, advantages, strict=True)]
    assert all(output.keep)
    torch.testing.assert_close(output.loss, torch.tensor(expected))
    torch.testing.assert_close(gradient, torch.tensor(expected))


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_mask_looks_at_the_difference_of_probabilities(sign):
    """0.01 -> 0.06 differs by 0.05 and stays; 0.90 -> 0.20 by 0.70 and goes, whatever A's sign."""
    pairs = [(0.06, 0.01), (0.01, 0.06), (0.20, 0.90), (0.90, 0.20)]
    lt, li = [math.log(t) for t, _ in pairs], [math.log(i) for _, i in pairs]
    output, gradient = run(lt, li, [sign] * 4)
    assert output.keep.tolist() == [True, True, False, False]
    assert output.metrics["is_masked"].tolist() == [False, False, True, True]
    torch.testing.assert_close(output.loss, -sign * torch.tensor([6.0, 1 / 6, 0.0, 0.0]))
    assert gradient[2:].tolist() == [0.0, 0.0]


def test_mismatch_is_split_by_the_mask():
    lt, li = [math.log(0.06), math.log(0.2)], [math.log(0.01), math.log(0.9)]
    output, _ = run(lt, li, [1.0, 1.0])
    kept, masked = 6 - 1 - math.log(6), 2 / 9 - 1 - math.log(2 / 9)
    torch.testing.assert_close(
        output.metrics["unmasked_mismatch_kl"], torch.tensor([kept, 0.0]), rtol=1e-5, atol=0
    )
    torch.testing.assert_close(
        output.metrics["masked_mismatch_kl"], torch.tensor([0.0, masked]), rtol=1e-5, atol=0
    )


def test_ratio_stops_at_the_cap_and_its_gradient_stays():
    """exp(89) overflows float32: the ratio is 1e4, and the gradient is that of 1e4, not 0 or inf."""
    output, gradient = run([-2.0, -2.0], [-91.0, -11.0], [1.0, -1.0], max_importance_ratio=1e4)
    torch.testing.assert_close(output.loss, torch.tensor([-1e4, math.exp(9)]), rtol=1e-5, atol=0)
    torch.testing.assert_close(gradient, torch.tensor([-1e4, math.exp(9)]), rtol=1e-5, atol=0)


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


def test_the_largest_settings_stay_finite():
    largest = {"adv_tau": 1e6, "max_importance_ratio": 1e6}
    output, gradient = run([-2.0, -2.0], [-91.0, -2.1], [1e6, -1e6], **largest)
    assert torch.isfinite(output.loss).all() and torch.isfinite(gradient).all()


def test_no_tokens():
    output, gradient = run([], [], [])
    assert output.loss.shape == (0,) and gradient.shape == (0,)


@pytest.mark.parametrize(
    "setting",
    [
        {"ipo_threshold": 0.1},
        {"kl_tau": 1e-3},
        {"eps": True},
        {"eps": 0.0},
        {"adv_tau": float("nan")},
        {"adv_tau": 1e300},
        {"max_importance_ratio": 1e300},
    ],
)
def test_removed_and_unusable_settings_are_refused(setting):
    with pytest.raises(ValidationError):
        IPOConfig(**setting)


@pytest.mark.parametrize(
    "key, answer",
    [
        ("ipo_threshold", "write trainer.loss.eps instead"),
        ("dppo_mask_low", "remove it: the mask has two equal sides, trainer.loss.eps"),
        ("dppo_mask_high", "remove it: the mask has two equal sides, trainer.loss.eps"),
        ("kl_tau", "remove it: the loss has no KL term"),
    ],
)
def test_old_names_are_answered(tmp_path, key, answer):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f'[trainer.loss]\ntype = "ipo"\n{key} = 0.2\n')
    with pytest.raises(ConfigError) as caught:
        load_run([str(recipe)], scan())
    assert f"recipe.toml:3: trainer.loss.{key}: unknown key; {answer}" in str(caught.value)
