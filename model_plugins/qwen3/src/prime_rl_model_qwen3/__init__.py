"""Qwen3 dense and mixture-of-experts models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api import Decoder, Kernels, Model, PluginConfig
from prime_rl_model_qwen3.config import Qwen3Config, Qwen3MoEConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prime_rl.api import WeightLayout
    from prime_rl_model_qwen3.architecture import Qwen3Architecture


class Qwen3(Model):
    """Qwen3 dense models, 0.6B to 32B."""

    Config: ClassVar[type[PluginConfig]] = Qwen3Config
    model_types = ("qwen3",)
    renderer = "qwen3"
    tool_parser: ClassVar[str | None] = "hermes"
    reasoning_parser: ClassVar[str | None] = "qwen3"
    vllm_architecture: ClassVar[str | None] = "Qwen3ForCausalLM"

    def architecture(self, config: dict[str, Any]) -> Qwen3Architecture:
        from prime_rl_model_qwen3.architecture import read_architecture

        return read_architecture(config)

    def build(self, architecture: Qwen3Architecture, kernels: Kernels) -> nn.Module:
        from prime_rl_model_qwen3.model import Qwen3Module

        return Qwen3Module(architecture, kernels)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        from prime_rl_model_qwen3.model import initialise

        initialise(module, generator)

    def layout(self, architecture: Qwen3Architecture) -> WeightLayout:
        from prime_rl_model_qwen3.layout import make_layout

        return make_layout(architecture)

    def router_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in module.named_parameters() if name.endswith(".router.weight")]

    def flops(self, architecture: Qwen3Architecture, seq_lens: Sequence[int]) -> float:
        from prime_rl_model_qwen3.flops import forward_flops

        return forward_flops(architecture, seq_lens)

    def decoder(
        self,
        module: nn.Module,
        architecture: Qwen3Architecture,
        max_slots: int,
        max_length: int,
    ) -> Decoder | None:
        from prime_rl_model_qwen3.decode import Qwen3Decoder
        from prime_rl_model_qwen3.model import Qwen3Module

        assert isinstance(module, Qwen3Module)
        return Qwen3Decoder(module, architecture, max_slots, max_length)


class Qwen3MoE(Qwen3):
    """Qwen3 mixture-of-experts models, 30B-A3B and 235B-A22B."""

    Config: ClassVar[type[PluginConfig]] = Qwen3MoEConfig
    model_types = ("qwen3_moe",)
    vllm_architecture: ClassVar[str | None] = "Qwen3MoeForCausalLM"
    debug_recipe = "debug_moe"
