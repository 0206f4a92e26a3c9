"""A model plugin small enough to read in a minute, for tests of whatever runs model plugins.

Each layer adds tanh(mean over the tokens so far) through a linear map; the odd layers scale it by
experts that a router picks. It has a decode cache, which `has_decoder = False` hides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api.layout import WeightLayout, rename, tie
from prime_rl.api.model import Decoder, Kernels, Model

if TYPE_CHECKING:
    import torch
    from torch import nn


@dataclass(frozen=True)
class ToyArchitecture:
    """Sizes."""

    vocab_size: int
    hidden_size: int = 16
    num_layers: int = 2
    num_experts: int = 4
    tie_word_embeddings: bool = False


class ToyModel(Model):
    """Serves `model_type` toy."""

    model_types = ("toy",)
    has_decoder: ClassVar[bool] = True

    def architecture(self, config: dict[str, Any]) -> ToyArchitecture:
        """As `Model.architecture`; everything but vocab_size has a default."""
        names = ("hidden_size", "num_layers", "num_experts", "tie_word_embeddings")
        return ToyArchitecture(
            config["vocab_size"], **{name: config[name] for name in names if name in config}
        )

    def build(self, architecture: ToyArchitecture, kernels: Kernels) -> nn.Module:
        """As `Model.build`; the back ends are not used."""
        from prime_rl.testing.toy_module import ToyModule

        return ToyModule(architecture)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """As `Model.initialise`."""
        for parameter in module.parameters():
            parameter.data.normal_(0.0, 0.5, generator=generator)

    def layout(self, architecture: ToyArchitecture) -> WeightLayout:
        """The checkpoint's names have `model.` in front."""
        layers = range(architecture.num_layers)
        return WeightLayout.of(
            rename("embed_tokens.weight", "model.embed_tokens.weight"),
            rename("layers.{i}.mix.weight", "model.layers.{i}.mix.weight", i=layers),
            rename("layers.{i}.router.weight", "model.layers.{i}.router.weight", i=layers),
            rename("layers.{i}.gains", "model.layers.{i}.gains", i=layers),
            tie("lm_head.weight")
            if architecture.tie_word_embeddings
            else rename("lm_head.weight", "lm_head.weight"),
        )

    def flops(self, architecture: ToyArchitecture, seq_lens: Sequence[int]) -> float:
        """As `Model.flops`: the linear maps and the head."""
        width = architecture.hidden_size
        per_layer = 2 * width * (width + architecture.num_experts)
        head = 2 * width * architecture.vocab_size
        return float(sum(seq_lens) * (per_layer * architecture.num_layers + head))

    def decoder(
        self, module: nn.Module, architecture: ToyArchitecture, max_slots: int, max_length: int
    ) -> Decoder | None:
        """As `Model.decoder`."""
        if not self.has_decoder:
            return None
        from prime_rl.testing.toy_module import ToyDecoder

        return ToyDecoder(module, max_slots)


class ToyModelWithoutDecoder(ToyModel):
    """The same model on the generic path."""

    has_decoder = False
