"""GLM-5, 5.1, 5.2 and 5.3: latent attention over selected keys, mixture of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api import Kernels, Model, PluginConfig
from prime_rl_model_glm5.config import Glm5Config

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prime_rl.api import WeightLayout
    from prime_rl_model_glm5.architecture import Glm5Architecture


class Glm5(Model):
    """Checkpoints with model_type `glm_moe_dsa`."""

    Config: ClassVar[type[PluginConfig]] = Glm5Config
    model_types = ("glm_moe_dsa",)
    renderer = "auto"  # glm-5, glm-5.1 and glm-5.3 differ; the library knows the releases by name
    tool_parser: ClassVar[str | None] = "glm47"
    reasoning_parser: ClassVar[str | None] = "glm45"
    vllm_architecture: ClassVar[str | None] = "GlmMoeDsaForCausalLM"

    def architecture(self, config: dict[str, Any]) -> Glm5Architecture:
        from prime_rl_model_glm5.architecture import read_architecture

        return read_architecture(config)

    def build(self, architecture: Glm5Architecture, kernels: Kernels) -> nn.Module:
        from prime_rl_model_glm5.model import Glm5Module
        from prime_rl_model_glm5.numerics import read_numerics

        return Glm5Module(architecture, kernels, read_numerics(self.config))

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        from prime_rl_model_glm5.model import initialise

        initialise(module, generator)

    def layout(self, architecture: Glm5Architecture) -> WeightLayout:
        from prime_rl_model_glm5.layout import make_layout

        return make_layout(architecture)

    def flops(self, architecture: Glm5Architecture, seq_lens: Sequence[int]) -> float:
        from prime_rl_model_glm5.flops import forward_flops

        return forward_flops(architecture, seq_lens)

    def router_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in module.named_parameters() if name.endswith(".router.weight")]

    def float32_modules(self, module: nn.Module) -> list[nn.Module]:
        """The routers: servers compute their logits in float32 as well."""
        return [part for name, part in module.named_modules() if name.endswith(".router")]

    def frozen_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The indexers: what they choose is an integer and has no gradient."""
        return [p for name, p in module.named_parameters() if ".indexer." in name]

    def export_config(
        self, config: dict[str, Any], architecture: Glm5Architecture
    ) -> dict[str, Any]:
        from prime_rl_model_glm5.export import served_config

        return served_config(config, architecture)
