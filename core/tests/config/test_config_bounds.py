"""Settings from which infinities or nothing at all would come are refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from prime_rl.algorithms.echo import EchoConfig
from prime_rl.algorithms.grpo import LinearLengthPenaltyConfig, OverlongConfig
from prime_rl.configs.curriculum import DifficultyPoolConfig, PoolConfig
from prime_rl.configs.orchestrator import SamplingConfig, TrainSourceConfig


@pytest.mark.parametrize("temperature", [0, 0.01, 1, 2])
def test_temperatures(temperature):
    assert SamplingConfig(temperature=temperature).temperature == temperature


@pytest.mark.parametrize("make, settings, message", [
    (SamplingConfig, {"temperature": 1e-300}, r"found the number 1e-300, expected 0 .* 0.01"),
    (SamplingConfig, {"temperature": 0.009}, "0.01"),
    (SamplingConfig, {"temperature": 2.1}, "less than or equal to 2"),
    (TrainSourceConfig, {"env": {}, "ratio": 1e308}, "less than or equal to 1000000"),
    (PoolConfig, {"name": "x", "max_reward": 1, "weight": 1e308}, "less than or equal to 1000000"),
    (DifficultyPoolConfig, {"unseen_weight": 1e308}, "less than or equal to 1000000"),
    (EchoConfig, {"alpha": {"tool": 1e300}}, "less than or equal to 1000000"),
    (EchoConfig, {"alpha": {"Tool": 0.1}}, "the role 'Tool', expected .* Did you mean 'tool'"),
    (EchoConfig, {"alpha": {"banana": 3}}, "one of system, user, assistant, tool."),
    (LinearLengthPenaltyConfig, {"output": 1e300}, "less than or equal to 1000000"),
    (OverlongConfig, {"max_tokens": 4, "cache_tokens": 5}, "cache_tokens 5 is above max_tokens 4"),
])  # fmt: skip
def test_refused(make, settings, message):
    with pytest.raises(ValidationError, match=message):
        make(**settings)


def test_the_largest():
    assert EchoConfig(alpha=dict.fromkeys(("system", "user", "assistant", "tool"), 1e6))
    assert OverlongConfig(max_tokens=5, cache_tokens=5)
