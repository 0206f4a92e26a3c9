"""Learning-rate schedules: a factor on the peak rate, as a plain function of the step.

i counts steps from 0; W = warmup_steps, D = decay_steps, M = max_steps, m = min_lr / lr.

    warm-up, i < W       s + (1 - s) * i / W, with s = m, or 1e-8 when m is 0
    constant             1
    linear, i >= M - D   1 - (1 - m) * (i - (M - D)) / (D - 1): the last step runs at m
    cosine, i >= W       m + (1 - m) * (1 + cos(pi * (i - W) / (M - W))) / 2
"""

from __future__ import annotations

import math

from prime_rl.configs.trainer import (
    ConstantScheduleConfig,
    CosineScheduleConfig,
    LinearScheduleConfig,
    ScheduleConfig,
)

SMALLEST_START = 1e-8


class Schedule:
    """Peak rate and shape; `steps_done` is all its state. The stage's config has checked that warm-up
    and decay fit into `max_steps`."""

    def __init__(self, config: ScheduleConfig, peak_lr: float, max_steps: int) -> None:
        self.config = config
        self.peak_lr = peak_lr
        self.max_steps = max_steps
        self.steps_done = 0

    @property
    def lr(self) -> float:
        """Rate of the next step."""
        return self.peak_lr * self._factor(self.steps_done)

    def advance(self) -> None:
        """A step was taken."""
        self.steps_done += 1

    def _factor(self, step: int) -> float:
        config = self.config
        floor = 0.0
        if not isinstance(config, ConstantScheduleConfig):
            floor = config.min_lr / self.peak_lr
        if step < config.warmup_steps:
            start = floor or SMALLEST_START
            return start + (1.0 - start) * step / config.warmup_steps
        if isinstance(config, LinearScheduleConfig):
            return self._linear(step, config.decay_steps, floor)
        if isinstance(config, CosineScheduleConfig):
            span = max(1, self.max_steps - config.warmup_steps)
            progress = min(1.0, (step - config.warmup_steps) / span)
            return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0
        return 1.0

    def _linear(self, step: int, decay_steps: int, floor: float) -> float:
        into_decay = step - (self.max_steps - decay_steps)
        if into_decay < 0 or decay_steps == 0:
            return 1.0
        if decay_steps == 1:
            return floor
        return 1.0 - (1.0 - floor) * min(1.0, into_decay / (decay_steps - 1))
