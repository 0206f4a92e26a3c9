"""Settings of losses through a whole run's configuration: defaults, and removed names."""

from __future__ import annotations

import pytest

from prime_rl.configs.load import load_run
from prime_rl.errors import ConfigError
from prime_rl.plugins import scan

DEFAULTS = {
    "ipo": {"eps": 0.3, "adv_tau": 1.0, "max_importance_ratio": 1e4},
    "icepop": {"ratio_low": 0.2, "ratio_high": 5.0, "adv_tau": 1.0},
    "ppo": {"ratio_low": 0.8, "ratio_high": 1.2, "max_importance_ratio": 1e4},
    "cispo": {"ratio_low": 0.0, "ratio_high": 5.0},
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_loss_is_chosen_by_name_and_has_these_defaults(name):
    run = load_run(["quickstart", "--rl.trainer.loss", name], scan()).run
    loss = run.stages[-1].trainer.loss
    assert loss.model_dump() == {"type": name, **DEFAULTS[name]}


@pytest.mark.parametrize("name", DEFAULTS)
@pytest.mark.parametrize("removed", ["ipo_threshold", "dppo_mask_low", "dppo_mask_high", "kl_tau"])
def test_removed_settings_fail_and_the_message_names_present_ones(name, removed):
    words = ["quickstart", "--rl.trainer.loss", name, f"--rl.trainer.loss.{removed}", "0.1"]
    with pytest.raises(ConfigError) as caught:
        load_run(words, scan())
    message = str(caught.value)
    assert f"trainer.loss.{removed}: unknown key" in message
    is_answered = "remove it" in message
    assert is_answered or any(setting in message for setting in DEFAULTS[name]), message


def test_a_near_miss_is_named():
    words = ["quickstart", "--rl.trainer.loss", "icepop", "--rl.trainer.loss.ratio_hi", "4"]
    with pytest.raises(ConfigError, match="ratio_high"):
        load_run(words, scan())
