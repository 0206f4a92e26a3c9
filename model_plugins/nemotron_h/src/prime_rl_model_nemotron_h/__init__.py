"""Nemotron-H hybrid models: Mamba-2, attention, dense and expert layers in one pattern."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api import Kernels, Model, PluginConfig
from prime_rl_model_nemotron_h.config import NemotronHConfig

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prime_rl.api import WeightLayout
    from prime_rl_model_nemotron_h.architecture import NemotronHArchitecture


class NemotronH(Model):
    """Nemotron 3 Nano and Super, and the earlier Nemotron-H models with dense layers."""

    Config: ClassVar[type[PluginConfig]] = NemotronHConfig
    model_types = ("nemotron_h",)
    renderer = "nemotron-3"
    tool_parser: ClassVar[str | None] = "qwen3_coder"
    reasoning_parser: ClassVar[str | None] = "nemotron_v3"
    vllm_architecture: ClassVar[str | None] = "NemotronHForCausalLM"

    def architecture(self, config: dict[str, Any]) -> NemotronHArchitecture:
        from prime_rl_model_nemotron_h.architecture import read_architecture

        return read_architecture(config)

    def build(self, architecture: NemotronHArchitecture, kernels: Kernels) -> nn.Module:
        from prime_rl_model_nemotron_h.model import NemotronHModule

        return NemotronHModule(architecture, kernels)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        from prime_rl_model_nemotron_h.initialise import initialise

        initialise(module, generator)

    def layout(self, architecture: NemotronHArchitecture) -> WeightLayout:
        from prime_rl_model_nemotron_h.layout import make_layout

        return make_layout(architecture)

    def router_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in module.named_parameters() if name.endswith(".router.weight")]

    def float32_modules(self, module: nn.Module) -> list[nn.Module]:
        """The state-space parameters and, as transformers keeps them, the routers."""
        from prime_rl.layers.moe import Router
        from prime_rl_model_nemotron_h.mamba import Recurrence

        return [part for part in module.modules() if isinstance(part, Recurrence | Router)]

    def flops(self, architecture: NemotronHArchitecture, seq_lens: Sequence[int]) -> float:
        from prime_rl_model_nemotron_h.flops import forward_flops

        return forward_flops(architecture, seq_lens)

    def export_config(
        self, config: dict[str, Any], architecture: NemotronHArchitecture
    ) -> dict[str, Any]:
        """What was read, with the name under which vLLM serves it."""
        return {"architectures": [self.vllm_architecture], **config}
