"""A tiny model that knows how to reverse words, made on the spot: a teacher for tests."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import torch
from tiny_run import RECIPE

from prime_rl.api.batch import PackedBatch
from prime_rl.configs.base import ValidationContext
from prime_rl.configs.model import FreshModelConfig, ModelConfig
from prime_rl.models.fresh import make_fresh_model
from prime_rl.models.head import head_weight
from prime_rl.models.load import load_weights
from prime_rl.models.renderers import load_renderer
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.setup import build, prepare
from prime_rl.plugins import scan


def teach(directory: Path, *, steps: int = 150, rows: int = 512, seed: int = 7) -> Path:
    """Train the tiny recipe's model on words and answers; its checkpoint directory."""
    from prime_rl_environment_reverse_text import sft_rows

    recipe: dict[str, Any] = tomllib.loads(
        RECIPE.format(seed=0, output="unused", sft_steps=1, rl_steps=1)
    )
    registry = scan()
    fresh_dir, taught_dir = directory / "fresh", directory / "taught"
    context = ValidationContext(registry.config_class)
    model = ModelConfig.model_validate({"name": str(fresh_dir)}, context=context)
    fresh = FreshModelConfig(
        architecture=recipe["model"]["fresh"]["architecture"], tokenizer="letters", seed=seed
    )
    make_fresh_model(fresh, model, fresh_dir, registry)
    setup = prepare(model, fresh_dir, registry)
    module = build(setup)
    load_weights(module, setup.layout, fresh_dir, "cpu")
    renderer = load_renderer(fresh_dir, "chatml")
    words = sft_rows(count=rows, prompt="{word}", min_length=2, max_length=3)
    rendered = [renderer.render(row["messages"]) for row in words]
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        chosen = torch.randint(len(rendered), (64,), generator=draw).tolist()
        batch = PackedBatch.from_documents([rendered[row].token_ids for row in chosen])
        sampled = torch.tensor([flag for row in chosen for flag in rendered[row].sampled_mask])
        hidden = setup.plugin.forward(module, batch)
        logits = hidden.float() @ head_weight(module).float().T
        logprobs = logits[:-1].log_softmax(-1).gather(1, batch.input_ids[1:, None])[:, 0]
        loss = -logprobs[sampled[1:]].mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    save_checkpoint(
        taught_dir,
        iter_checkpoint(module, setup.layout),
        setup.config_json,
        tokenizer_source=fresh_dir,
    )
    return taught_dir
