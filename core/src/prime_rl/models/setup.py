"""Puts a model together: plugin, architecture, back ends, layout; builds its module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from prime_rl.api.backends import AttentionBackend, DSABackend, MoEBackend
from prime_rl.api.layout import WeightLayout
from prime_rl.api.model import Architecture, Kernels, Model
from prime_rl.errors import ConfigError
from prime_rl.models.choose import make_plugin, read_config_json

if TYPE_CHECKING:
    from prime_rl.configs.base import PluginConfig
    from prime_rl.configs.model import ModelConfig
    from prime_rl.plugins.registry import Registry


@dataclass(frozen=True)
class ModelSetup:
    """Everything about the model of a run but its weights."""

    plugin: Model
    architecture: Architecture
    kernels: Kernels
    layout: WeightLayout
    config_json: dict[str, Any]
    model_dir: Path

    def export_config(self) -> dict[str, Any]:
        """config.json of an export."""
        return self.plugin.export_config(self.config_json, self.architecture)


def prepare(model: ModelConfig, model_dir: Path, registry: Registry) -> ModelSetup:
    """Choose the plugin by the checkpoint's model_type (or `model.plugin`) and read it.

    Raises CheckpointError, ConfigError or PluginError.
    """
    config = read_config_json(model_dir)
    plugin = make_plugin(model, config, registry)
    architecture = plugin.architecture(config)
    return ModelSetup(
        plugin=plugin,
        architecture=architecture,
        kernels=make_kernels(model, architecture.num_layers, registry),
        layout=plugin.layout(architecture),
        config_json=config,
        model_dir=model_dir,
    )


def make_kernels(model: ModelConfig, num_layers: int, registry: Registry) -> Kernels:
    """The back ends that the run chose."""

    def make(kind: str, section: PluginConfig) -> Any:
        return registry.load(kind, section.type)(section)

    attention = make("attention_backend", model.attention)
    assert isinstance(attention, AttentionBackend)
    dsa = make("dsa_backend", model.dsa_backend)
    assert isinstance(dsa, DSABackend)
    default = make("moe_backend", model.moe.backend)
    assert isinstance(default, MoEBackend)
    by_layer: list[MoEBackend] = [default] * num_layers
    named: set[int] = set()
    for section in model.moe.layers:
        backend = make("moe_backend", section.backend)
        for layer in section.layers:
            if not 0 <= layer < num_layers or layer in named:
                problem = "named twice" if layer in named else f"the model has {num_layers} layers"
                raise ConfigError(f"model.moe.layers: layer {layer}: {problem}")
            named.add(layer)
            by_layer[layer] = backend
    return Kernels(attention=attention, moe=by_layer, dsa=dsa)


def build(
    setup: ModelSetup,
    device: str | torch.device = "meta",
    dtype: torch.dtype = torch.float32,
    router_dtype: torch.dtype | None = None,
) -> nn.Module:
    """The module with uninitialised weights in `dtype`, but for tensors whose dtype the model fixes.

    `router_dtype` is the dtype of the router parameters, unless the model fixes it; a router
    computes in its weights' dtype.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            module = setup.plugin.build(setup.architecture, setup.kernels)
    finally:
        torch.set_default_dtype(before)
    if router_dtype is not None:
        exact = setup.plugin.float32_modules(module)
        fixed = {id(parameter) for part in exact for parameter in part.parameters()}
        for parameter in setup.plugin.router_parameters(module):
            if id(parameter) not in fixed:
                parameter.data = parameter.data.to(router_dtype)
    return module
