"""The LM head's weight, whether it is tied to the embedding or not."""

from __future__ import annotations

from torch import Tensor, nn


def head_weight(module: nn.Module) -> Tensor:
    """[V, H]: the head's own weight, or the embedding's when the head is tied."""
    head = module.lm_head
    owner = module.embed_tokens if head is None else head
    assert isinstance(owner, nn.Module) and isinstance(owner.weight, Tensor)
    return owner.weight
