"""Random start values."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from prime_rl.layers.start_values import fill_normal, undrawn
from prime_rl_model_nemotron_h.architecture import MambaSettings
from prime_rl_model_nemotron_h.mamba import Mamba
from prime_rl_model_nemotron_h.model import NemotronHModule


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Normal matrices with the config's `initializer_range`, unit norms, zero biases; the Mamba
    layers' own values as they were trained from (`_start_mamba`)."""
    assert isinstance(module, NemotronHModule)
    architecture = module.architecture
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.fill_(1.0)
        elif name.endswith(".bias"):
            parameter.zero_()
        else:
            spread = architecture.initializer_range
            fill_normal(parameter, spread, generator)
    for buffer in module.buffers():
        buffer.zero_()
    for part in module.modules():
        if isinstance(part, Mamba):
            _start_mamba(part, architecture.num_layers, generator)


def _start_mamba(mamba: Mamba, layers: int, generator: torch.Generator) -> None:
    """Rates 1 to the number of heads, log-uniform time steps, uniform taps and output projection;
    the latter smaller the deeper the model."""
    settings, recurrence = mamba.settings, mamba.recurrence
    recurrence.A_log.copy_(torch.arange(1, settings.heads + 1).log())
    recurrence.D.fill_(1.0)
    recurrence.dt_bias.copy_(_raw_steps(recurrence.dt_bias, settings, generator))
    for weight, bound in (
        (mamba.conv.weight, settings.taps**-0.5),
        (mamba.out.weight, (settings.inner * layers) ** -0.5),
    ):
        weight.copy_(undrawn(weight, generator).uniform_(-bound, bound, generator=generator))


def _raw_steps(like: Tensor, settings: MambaSettings, generator: torch.Generator) -> Tensor:
    """What softplus turns into time steps that are uniform in the logarithm."""
    smallest, largest, floor = settings.start_steps
    drawn = undrawn(like, generator).uniform_(
        math.log(smallest), math.log(largest), generator=generator
    )
    step = drawn.exp().clamp(min=floor)
    return step + (-torch.expm1(-step)).log()
