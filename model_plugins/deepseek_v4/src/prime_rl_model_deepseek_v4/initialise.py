"""Random start values."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from prime_rl.layers.start_values import fill_normal
from prime_rl_model_deepseek_v4.feed_forward import HashMoEBlock

_ONES = ("norm.weight", ".scale", "_head.scale")
_ZEROS = (".base", ".logit", ".position_bias.bias")


@torch.no_grad()
def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Normal matrices with the config's `initializer_range`, unit norms and scales, zero biases and
    sinks, and for every token id distinct random experts in the layers that look them up.
    """
    from prime_rl_model_deepseek_v4.model import DeepseekV4Module

    assert isinstance(module, DeepseekV4Module)
    spread = module.architecture.initializer_range
    for name, parameter in module.named_parameters():
        if name.endswith(_ONES):
            parameter.fill_(1.0)
        elif name.endswith(_ZEROS):
            parameter.zero_()
        else:
            fill_normal(parameter, spread, generator)
    for part in module.modules():
        if isinstance(part, HashMoEBlock):
            part.token_experts.copy_(_distinct_experts(part, generator))
    for name, buffer in module.named_buffers():
        if name.endswith(".selection_bias"):
            buffer.zero_()


def _distinct_experts(block: HashMoEBlock, generator: torch.Generator) -> Tensor:
    vocabulary, per_token = block.token_experts.shape
    chances = torch.rand(
        vocabulary, block.router.settings.experts, generator=generator, device=generator.device
    )
    return chances.topk(per_token, dim=-1).indices
