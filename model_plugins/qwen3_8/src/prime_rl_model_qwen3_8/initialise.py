"""Random start values of a Qwen3.8 model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl_model_qwen3_8.model import Qwen38Module
from prime_rl_model_qwen3_8.ngram import NgramLookup


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Normal matrices with the config's `initializer_range`, unit norms, decays of uniform speed,
    n-gram convolution off.

    Drawn in float32 on the generator's device and copied, so dtype and device change no value
    beyond rounding.
    """
    assert isinstance(module, Qwen38Module)
    spread = module.architecture.initializer_range
    for lookup in module.ngrams:
        assert isinstance(lookup, NgramLookup)
        lookup.fill_constants()
    for name, parameter in module.named_parameters():
        if name.endswith("delta.norm") or name.endswith("dt_bias"):
            parameter.fill_(1.0)
        elif name.endswith("norm.weight") or name.endswith("ngram.conv"):
            parameter.zero_()
        elif name.endswith("a_log"):
            parameter.copy_(
                _empty_like(parameter, generator).uniform_(0.01, 16, generator=generator).log_()
            )
        else:
            drawn = _empty_like(parameter, generator)
            parameter.copy_(drawn.normal_(0.0, spread, generator=generator))


def _empty_like(parameter: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty(parameter.shape, dtype=torch.float32, device=generator.device)
