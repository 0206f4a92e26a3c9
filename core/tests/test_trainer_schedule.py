"""Learning rates by hand, sign SGD by hand, the bound on the norm."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from prime_rl.configs.trainer import (
    AdamWConfig,
    ConstantScheduleConfig,
    CosineScheduleConfig,
    LinearScheduleConfig,
    SignSGDConfig,
)
from prime_rl.trainer.optim import build_optimizer, clip_gradients, gradient_norm
from prime_rl.trainer.schedule import Schedule


def rates(config, max_steps, lr=2.0):
    schedule = Schedule(config, lr, max_steps)
    found = []
    for _ in range(max_steps):
        found.append(schedule.lr)
        schedule.advance()
    return found


def test_constant():
    assert rates(ConstantScheduleConfig(), 3) == [2.0, 2.0, 2.0]
    warm = rates(ConstantScheduleConfig(warmup_steps=4), 6)
    assert warm == pytest.approx([2e-8, 0.5, 1.0, 1.5, 2.0, 2.0], rel=1e-6)


def test_linear_ends_at_its_floor_on_the_last_step():
    config = LinearScheduleConfig(warmup_steps=2, decay_steps=3, min_lr=0.5)
    assert rates(config, 7) == pytest.approx([0.5, 1.25, 2.0, 2.0, 2.0, 1.25, 0.5])
    assert rates(LinearScheduleConfig(warmup_steps=0, decay_steps=0), 2) == [2.0, 2.0]
    assert rates(LinearScheduleConfig(warmup_steps=0, decay_steps=1, min_lr=1.0), 2) == [2.0, 1.0]


def test_cosine():
    config = CosineScheduleConfig(warmup_steps=1, min_lr=0.4)
    expected = [0.4] + [0.4 + 1.6 * (1 + math.cos(math.pi * j / 4)) / 2 for j in range(4)]
    assert rates(config, 5) == pytest.approx(expected)


def test_continues_where_it_stopped():
    config = LinearScheduleConfig(warmup_steps=2, decay_steps=4)
    resumed = Schedule(config, 2.0, 10)
    resumed.steps_done = 7
    assert resumed.lr == rates(config, 10)[7]


def parameter(values, gradient):
    made = nn.Parameter(torch.tensor(values))
    made.grad = torch.tensor(gradient)
    return made


def test_sign_sgd_by_hand():
    weights = parameter([1.0, -2.0, 4.0], [0.3, -7.0, 0.0])
    optimizer = build_optimizer(SignSGDConfig(lr=0.5, weight_decay=0.1), [weights], "rl")
    optimizer.step()
    torch.testing.assert_close(weights.data, torch.tensor([0.45, -1.4, 3.8]))
    assert optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize(("stage", "decay"), [("rl", 0.0), ("sft", 0.01)])
def test_automatic_weight_decay(stage, decay):
    optimizer = build_optimizer(AdamWConfig(), [parameter([1.0], [1.0])], stage)
    assert optimizer.param_groups[0]["weight_decay"] == decay


def test_frozen_parameters_are_left_out():
    frozen = nn.Parameter(torch.ones(2), requires_grad=False)
    optimizer = build_optimizer(AdamWConfig(), [frozen, parameter([1.0], [1.0])], "rl")
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1


def test_norm_is_global_and_bounded():
    weights = [parameter([0.0], [3.0]), parameter([0.0], [4.0])]
    norm = gradient_norm(weights)
    assert norm.item() == pytest.approx(5.0)
    clip_gradients(weights, norm, 1.0)
    assert [w.grad.item() for w in weights] == pytest.approx([0.6, 0.8], rel=1e-5)
