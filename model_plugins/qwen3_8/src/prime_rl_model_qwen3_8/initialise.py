"""Random start values of a Qwen3.8 model."""

from __future__ import annotations

import torch
from torch import nn

from prime_rl.layers.start_values import fill_normal, undrawn
from prime_rl_model_qwen3_8.model import Qwen38Module
from prime_rl_model_qwen3_8.ngram import NgramLookup


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Normal matrices with the config's `initializer_range`, unit norms, decays of uniform speed,
    n-gram convolution off.
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
                undrawn(parameter, generator).uniform_(0.01, 16, generator=generator).log_()
            )
        else:
            fill_normal(parameter, spread, generator)
