"""The model contract: architecture, module, weight layout, cost."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api.backends import AttentionBackend, DSABackend, MoEBackend
from prime_rl.api.plugin import Plugin

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from prime_rl.api.batch import PackedBatch
    from prime_rl.api.layout import WeightLayout

Architecture = Any
"""A frozen dataclass or pydantic model of the plugin's own, read from config.json. It must have
`vocab_size: int`, `hidden_size: int`, `num_layers: int` and `tie_word_embeddings: bool`."""


@dataclass(frozen=True)
class Kernels:
    """The back ends a module computes with, chosen by the run."""

    attention: AttentionBackend
    moe: Sequence[MoEBackend]
    """One per layer, by global layer number."""
    dsa: DSABackend | None = None


@dataclass(frozen=True)
class DecodeRequest:
    """Tokens to append to one running sequence."""

    slot: int
    """Place in the cache, 0 <= slot < max_slots."""
    start: int
    """Position of the first new token; the cache holds `start` tokens of this sequence."""
    tokens: Sequence[int]


class Decoder:
    """A decode cache. Without one, the engine recomputes whole sequences at every step."""

    @abstractmethod
    def forward(self, requests: Sequence[DecodeRequest]) -> Tensor:
        """Append the tokens of each request and return the final hidden state of each request's
        last token: [len(requests), H]. One request per slot."""

    @abstractmethod
    def forget(self) -> None:
        """Weights changed: drop everything cached. The engine appends running sequences anew."""


class Model(Plugin):
    """A model family."""

    model_types: ClassVar[tuple[str, ...]] = ()
    """Values of `model_type` in config.json that this plugin serves."""
    renderer: ClassVar[str] = "auto"
    """Name of the renderer that turns messages into tokens."""
    tool_parser: ClassVar[str | None] = None
    reasoning_parser: ClassVar[str | None] = None
    vllm_architecture: ClassVar[str | None] = None
    """Architecture name under which vLLM serves exported checkpoints."""
    debug_recipe: ClassVar[str] = "debug"
    """Recipe in the package's `recipes/` that `prime run --plugin NAME` runs."""

    @abstractmethod
    def architecture(self, config: dict[str, Any]) -> Architecture:
        """Read config.json. Raises ConfigError naming the key that is missing or unsupported."""

    @abstractmethod
    def build(self, architecture: Architecture, kernels: Kernels) -> nn.Module:
        """The module on the current default device (meta included), weights uninitialised.

        The module's forward takes a PackedBatch and returns final hidden states [T, H], after the
        final norm. `module.lm_head` is an `nn.Linear` without bias, or None when the embedding
        `module.embed_tokens` is tied. `module.layers` is an `nn.ModuleList` of the blocks.

        Parameters are made in torch's default dtype, but for those whose dtype the model fixes. No
        non-persistent buffers: a module is built on the meta device and filled from a checkpoint,
        so what can be computed is computed when it is needed. Routers compute in the dtype of
        their weights, which a run may set apart (`model.moe.router_dtype`).
        """

    @abstractmethod
    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        """Fill every parameter and buffer with random start values, in place."""

    @abstractmethod
    def layout(self, architecture: Architecture) -> WeightLayout:
        """How runtime tensors relate to the Hugging Face checkpoint."""

    @abstractmethod
    def flops(self, architecture: Architecture, seq_lens: Sequence[int]) -> float:
        """Floating-point operations of one forward over documents of these lengths, LM head
        included (a multiply-add counts 2). Training costs three times as much."""

    def decoder(
        self, module: nn.Module, architecture: Architecture, max_slots: int, max_length: int
    ) -> Decoder | None:
        """A decode cache for the module, or None: the generic path serves."""
        return None

    def router_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters that `model.moe.freeze_router` fixes."""
        return []

    def float32_modules(self, module: nn.Module) -> list[nn.Module]:
        """Modules whose parameters stay and compute in float32 whatever the run's compute dtype.

        `build` makes these parameters float32 explicitly. They may be used only inside the module's
        own forward, where sharding gathers them; it converts its inputs itself and returns float32.
        One without inputs takes an empty tensor all the same: recomputed on an accelerator, torch's
        sharding fails at a call without any.
        """
        return []

    def frozen_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """Parameters that never get a gradient, such as those of an indexer."""
        return []

    def export_config(self, config: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
        """config.json of an export; by default what was read."""
        return dict(config)

    def forward(self, module: nn.Module, batch: PackedBatch) -> Tensor:
        """Final hidden states [T, H]; the default calls the module."""
        hidden: Tensor = module(batch)
        return hidden
