"""Optimizers over the trainable parameters, and the bound on the gradient norm."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from prime_rl.configs.trainer import AdamWConfig, OptimConfig

AUTO_WEIGHT_DECAY = {"rl": 0.0, "sft": 0.01}


def build_optimizer(
    config: OptimConfig, parameters: Iterable[nn.Parameter], stage_type: str
) -> torch.optim.Optimizer:
    """The configured optimizer over those parameters that train."""
    trainable = _by_mesh(parameter for parameter in parameters if parameter.requires_grad)
    groups = [{"params": sharded_alike} for sharded_alike in trainable]
    decay = config.weight_decay
    if decay == "auto":
        decay = AUTO_WEIGHT_DECAY[stage_type]
    if isinstance(config, AdamWConfig):
        return torch.optim.AdamW(
            groups,
            lr=config.lr,
            betas=(config.betas1, config.betas2),
            eps=config.eps,
            weight_decay=decay,
            fused=True,
        )
    return SignSGD(groups, lr=config.lr, weight_decay=decay)


class SignSGD(torch.optim.Optimizer):
    """w -= lr * weight_decay * w; w -= lr * sign(gradient). Keeps no state."""

    def __init__(self, params: Iterable[Any], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step; `closure` is evaluated first when given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if group["weight_decay"]:
                    parameter.mul_(1.0 - group["lr"] * group["weight_decay"])
                parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        return loss


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """The rate of every group for the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global L2 norm of all gradients, over all shards: a collective when parameters are sharded."""
    norms = []
    for sharded_alike in _by_mesh(parameters):
        gradients = [p.grad for p in sharded_alike if p.grad is not None]
        if not gradients:
            continue
        norm = torch.nn.utils.get_total_norm(gradients)
        gather = getattr(norm, "full_tensor", None)  # a DTensor's; importing the class takes 0.8 s
        norms.append(norm if gather is None else gather())
    return norms[0] if len(norms) == 1 else torch.nn.utils.get_total_norm(norms)


def clip_gradients(parameters: list[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients so that their norm is at most `max_norm`."""
    for sharded_alike in _by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(sharded_alike, max_norm, norm)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Parameters by the ranks they are sharded over; torch computes only with tensors that are
    sharded over the same ones."""
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())
