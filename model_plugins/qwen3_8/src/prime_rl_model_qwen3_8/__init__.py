"""Qwen3.8 Flash Next: Gated DeltaNet, sparse attention, gated residual streams, n-gram table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from prime_rl.api import Kernels, Model, PluginConfig
from prime_rl_model_qwen3_8.config import Qwen38Config

if TYPE_CHECKING:
    import torch
    from torch import nn

    from prime_rl.api import WeightLayout
    from prime_rl_model_qwen3_8.architecture import Qwen38Architecture


class Qwen38(Model):
    """The text part of Qwen3.8 Flash Next."""

    Config: ClassVar[type[PluginConfig]] = Qwen38Config
    model_types = (
        "qwen4_exp",
        "qwen4_exp_text",
        "qwen3_8_flash_next",
        "qwen3_8_flash_next_text",
    )
    renderer = "qwen3.8"
    tool_parser: ClassVar[str | None] = "qwen3_coder"
    reasoning_parser: ClassVar[str | None] = "qwen3"
    vllm_architecture: ClassVar[str | None] = "Qwen4ExpForConditionalGeneration"

    def architecture(self, config: dict[str, Any]) -> Qwen38Architecture:
        from prime_rl_model_qwen3_8.architecture import read_architecture

        return read_architecture(config)

    def build(self, architecture: Qwen38Architecture, kernels: Kernels) -> nn.Module:
        from prime_rl_model_qwen3_8.model import Qwen38Module

        assert isinstance(self.config, Qwen38Config)
        options = self.config
        return Qwen38Module(architecture, kernels, options.table_trainable, options.table_on_cpu)

    def initialise(self, module: nn.Module, generator: torch.Generator) -> None:
        from prime_rl_model_qwen3_8.initialise import initialise

        initialise(module, generator)

    def layout(self, architecture: Qwen38Architecture) -> WeightLayout:
        from prime_rl_model_qwen3_8.layout import make_layout

        return make_layout(architecture)

    def router_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in module.named_parameters() if name.endswith(".router.weight")]

    def frozen_parameters(self, module: nn.Module) -> list[nn.Parameter]:
        """The indexers, and the table unless it is trained."""
        assert isinstance(self.config, Qwen38Config)
        marks = [".indexer."] if self.config.table_trainable else [".indexer.", "ngrams."]
        return [
            parameter
            for name, parameter in module.named_parameters()
            if any(mark in name for mark in marks)
        ]

    def float32_modules(self, module: nn.Module) -> list[nn.Module]:
        """The decay of every DeltaNet layer."""
        from prime_rl_model_qwen3_8.delta_net import Decay

        return [part for part in module.modules() if isinstance(part, Decay)]

    def flops(self, architecture: Qwen38Architecture, seq_lens: Sequence[int]) -> float:
        from prime_rl_model_qwen3_8.flops import forward_flops

        return forward_flops(architecture, seq_lens)

    def export_config(
        self, config: dict[str, Any], architecture: Qwen38Architecture
    ) -> dict[str, Any]:
        from prime_rl_model_qwen3_8.export import exported_config

        return exported_config(config, architecture)
