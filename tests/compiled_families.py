"""Rows through a model with compiled blocks and through the same model as it is, for tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from ranks_of_families import VOCABULARY
from torch import Tensor, nn
from trainer_world import random_micro_batch

from prime_rl.api import Kernels
from prime_rl.configs.run import RunConfig
from prime_rl.models.load import load_weights
from prime_rl.models.setup import build, prepare
from prime_rl.plugins import scan
from prime_rl.trainer.batch import build_row
from prime_rl.trainer.policy import Policy
from prime_rl.trainer.streams import Streams

Outcome = tuple[Tensor, dict[str, Tensor]]
"""Log-probabilities and gradients by parameter."""


def trained_rows(
    run: RunConfig,
    folder: Path,
    device: str,
    dtype: torch.dtype,
    rows: list[list[int]],
    compile_blocks: Callable[[nn.Module, Kernels], None] | None,
) -> list[Outcome]:
    """Of rows with these lengths of documents, one after the other."""
    setup = prepare(run.stages[0].model, folder, scan())
    module = build(setup, device, dtype, router_dtype=torch.float32)
    load_weights(module, setup.layout, folder, torch.device(device))
    if compile_blocks is not None:
        compile_blocks(module, setup.kernels)
    policy = Policy(setup.plugin, module, 64, with_entropy=True)
    found = []
    for number, lengths in enumerate(rows):
        streams = Streams.from_micro_batch(random_micro_batch(number, VOCABULARY, lengths))
        logprobs, _ = policy(build_row(streams, torch.device(device)))
        module.zero_grad()
        (logprobs * torch.linspace(-1, 1, logprobs.shape[0], device=device)).sum().backward()
        gradients = {
            name: parameter.grad.float()
            for name, parameter in module.named_parameters()
            if parameter.grad is not None
        }
        found.append((logprobs.detach(), gradients))
    return found


def differences(found: Outcome, expected: Outcome) -> tuple[float, float, str]:
    """(mean difference of log-probabilities, largest relative one of a gradient, whose). A gradient
    counts as at least a thousandth of all gradients together: smaller ones are mostly rounding."""
    (logprobs, gradients), (wanted_logprobs, wanted) = found, expected
    assert gradients.keys() == wanted.keys()
    floor = 1e-3 * torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    off = {
        name: float((gradients[name] - gradient).norm() / torch.maximum(gradient.norm(), floor))
        for name, gradient in wanted.items()
    }
    worst = max(off, key=lambda name: off[name])
    return float((logprobs - wanted_logprobs).abs().mean()), off[worst], worst
