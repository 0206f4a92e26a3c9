"""Makes a model with random weights on disk: tokenizer, config.json, safetensors."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from prime_rl.errors import ConfigError
from prime_rl.models.choose import make_plugin
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.setup import ModelSetup, build, make_kernels
from prime_rl.models.tokenizers import build_tokenizer

if TYPE_CHECKING:
    from prime_rl.configs.model import FreshModelConfig, ModelConfig
    from prime_rl.plugins.registry import Registry


def make_fresh_model(
    fresh: FreshModelConfig, model: ModelConfig, directory: Path, registry: Registry
) -> None:
    """Write a Hugging Face checkpoint with random float32 weights drawn from `fresh.seed`.

    `vocab_size` is the tokenizer's unless the architecture states a larger one. Raises ConfigError
    when it states a smaller one, and for whatever else the model plugin refuses in it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as name:
        tokenizer_dir = Path(name)
        tokens = build_tokenizer(fresh.tokenizer, tokenizer_dir)
        config = fresh_config(fresh, tokens)
        try:
            plugin = make_plugin(model, config, registry)
            architecture = plugin.architecture(config)
        except ConfigError as error:  # there is no config.json yet: the keys are the recipe's
            raise ConfigError(_about_recipe(str(error))) from error
        setup = ModelSetup(
            plugin=plugin,
            architecture=architecture,
            kernels=make_kernels(model, architecture.num_layers, registry),
            layout=plugin.layout(architecture),
            config_json=config,
            model_dir=directory,
        )
        if plugin.vllm_architecture is not None:
            config.setdefault("architectures", [plugin.vllm_architecture])
        module = build(setup, "cpu", torch.float32)
        plugin.initialise(module, torch.Generator().manual_seed(fresh.seed))
        save_checkpoint(
            directory, iter_checkpoint(module, setup.layout), setup.export_config(), tokenizer_dir
        )


def _about_recipe(text: str) -> str:
    start = "config.json: "
    return (
        f"model.fresh.architecture.{text.removeprefix(start)}" if text.startswith(start) else text
    )


def fresh_config(fresh: FreshModelConfig, tokens: int) -> dict[str, Any]:
    """config.json of a fresh model whose tokenizer has `tokens` entries."""
    config = dict(fresh.architecture)
    stated = config.setdefault("vocab_size", tokens)
    if not isinstance(stated, int) or stated < tokens:
        raise ConfigError(
            f"model.fresh.architecture.vocab_size is {stated!r}, but the {fresh.tokenizer!r} "
            f"tokenizer has {tokens} tokens: leave it out or make it larger"
        )
    config.setdefault("dtype", "float32")
    return config
