"""DeepSeek V4 models: sliding, sparse and heavily compressed attention, hyper-connections, MoE."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api import Kernels, Model, PluginConfig
from prime_rl_model_deepseek_v4.config import DeepseekV4Config

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prime_rl.api import WeightLayout
    from prime_rl_model_deepseek_v4.architecture import DeepseekV4Architecture


class DeepseekV4(Model):
    """DeepSeek V4 Flash (284 B) and Pro."""

    Config: ClassVar[type[PluginConfig]] = DeepseekV4Config
    model_types = ("deepseek_v4",)
    renderer = "deepseek-v4"
    tool_parser: ClassVar[str | None] = "deepseek_v4"
    reasoning_parser: ClassVar[str | None] = "deepseek_v4"
    vllm_architecture: ClassVar[str | None] = "DeepseekV4ForCausalLM"

    def architecture(self, config: dict[str, Any]) -> DeepseekV4Architecture:
        from prime_rl_model_deepseek_v4.architecture import read_architecture

        return read_architecture(config)

    def build(self, architecture: DeepseekV4Architecture, kernels: Kernels) -> nn.Module:
        from prime_rl_model_deepseek_v4.model import DeepseekV4Module
        from prime_rl_model_deepseek_v4.numerics import read_numerics

        return DeepseekV4Module(architecture, kernels, read_numerics(self.config))

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        from prime_rl_model_deepseek_v4.initialise import initialise

        initialise(module, generator)

    def layout(self, architecture: DeepseekV4Architecture) -> WeightLayout:
        from prime_rl_model_deepseek_v4.layout import make_layout

        return make_layout(architecture)

    def router_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in module.named_parameters() if name.endswith(".router.weight")]

    def float32_modules(self, module: nn.Module) -> list[nn.Module]:
        from prime_rl_model_deepseek_v4.model import float32_modules

        return float32_modules(module)

    def frozen_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in module.named_parameters() if ".indexer." in name]

    def export_config(
        self, config: dict[str, Any], architecture: DeepseekV4Architecture
    ) -> dict[str, Any]:
        from prime_rl_model_deepseek_v4.export import export_config

        return export_config(config, architecture)

    def flops(self, architecture: DeepseekV4Architecture, seq_lens: Sequence[int]) -> float:
        from prime_rl_model_deepseek_v4.flops import forward_flops

        return forward_flops(architecture, seq_lens)
