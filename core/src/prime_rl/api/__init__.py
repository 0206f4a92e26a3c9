"""Everything a plugin author may import. Names load on first use; importing this loads no torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_HOMES = {
    "Plugin": "plugin",
    "Capabilities": "plugin",
    "PluginConfig": "plugin",
    "PackedBatch": "batch",
    "Model": "model",
    "Architecture": "model",
    "Decoder": "model",
    "DecodeRequest": "model",
    "Kernels": "model",
    "Loss": "loss",
    "LossInputs": "loss",
    "LossOutput": "loss",
    "Algorithm": "algorithm",
    "AlgorithmNeeds": "algorithm",
    "Group": "algorithm",
    "Episode": "algorithm",
    "Branch": "algorithm",
    "Credit": "algorithm",
    "FrozenModelConfig": "algorithm",
    "ReferenceContext": "algorithm",
    "AttentionBackend": "backends",
    "MoEBackend": "backends",
    "ExpertActivation": "backends",
    "DSABackend": "backends",
    "WeightTransport": "transport",
    "Sender": "transport",
    "Receiver": "transport",
    "NamedTensor": "transport",
    "Router": "router",
    "Engine": "engine",
    "EngineSpec": "engine",
    "Launcher": "launcher",
    "Process": "launcher",
    "WeightLayout": "layout",
    "hookimpl": "hooks",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from prime_rl.api.algorithm import (
        Algorithm,
        AlgorithmNeeds,
        Branch,
        Credit,
        Episode,
        FrozenModelConfig,
        Group,
        ReferenceContext,
    )
    from prime_rl.api.backends import AttentionBackend, DSABackend, ExpertActivation, MoEBackend
    from prime_rl.api.batch import PackedBatch
    from prime_rl.api.engine import Engine, EngineSpec
    from prime_rl.api.hooks import hookimpl
    from prime_rl.api.launcher import Launcher, Process
    from prime_rl.api.layout import WeightLayout
    from prime_rl.api.loss import Loss, LossInputs, LossOutput
    from prime_rl.api.model import Architecture, Decoder, DecodeRequest, Kernels, Model
    from prime_rl.api.plugin import Capabilities, Plugin, PluginConfig
    from prime_rl.api.router import Router
    from prime_rl.api.transport import NamedTensor, Receiver, Sender, WeightTransport


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'prime_rl.api' has no attribute {name!r}")
    return getattr(importlib.import_module(f"prime_rl.api.{home}"), name)
