"""What an episode's request says about model client and sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prime_rl.configs.frozen import FrozenModelConfig
from prime_rl.configs.orchestrator import SamplingConfig
from prime_rl.models.renderers import renderer_settings
from prime_rl.orchestrator.episode import EpisodeRequest

API_KEY_VARIABLE = "PRIME_RL_API_KEY"


FROZEN_SALT = "frozen"
"""Cache salt of models that never change."""


def client_settings(base_url: str, tokenizer: Path, renderer: str) -> dict[str, Any]:
    """The train client of `verifiers`: tokens in, tokens out. The same for every episode, because
    env servers keep one connection pool and one renderer per distinct value."""
    return {
        "type": "train",
        "base_url": f"{base_url.rstrip('/')}/v1",
        "api_key_var": API_KEY_VARIABLE,
        "renderer": renderer_settings(renderer),
        "renderer_model_name": str(tokenizer),
    }


def frozen_client_settings(
    model: FrozenModelConfig, tokenizer: Path, renderer: str
) -> dict[str, Any]:
    """The same for episodes that a frozen model plays."""
    return client_settings(model.base_url, tokenizer, renderer) | {
        "api_key_var": model.api_key_var,
        "headers": dict(model.headers),
        "timeout": {"read": model.timeout_s},
    }


def sampling_settings(
    config: SamplingConfig, request: EpisodeRequest, group_size: int, is_frozen: bool = False
) -> dict[str, Any]:
    """Sampling parameters of one episode. `cache_salt` is the dispatch version: a prefix that an
    engine cached under older weights is never reused; what a frozen model cached always is. A seed
    is made different for every member."""
    settings: dict[str, Any] = {
        "temperature": config.temperature,
        "top_p": config.top_p,
        "cache_salt": FROZEN_SALT if is_frozen else str(request.version),
    }
    if config.max_completion_tokens is not None:
        settings["max_tokens"] = config.max_completion_tokens
    if config.top_k is not None:
        settings["top_k"] = config.top_k
    if config.seed is not None:
        settings["seed"] = config.seed + request.group_id * group_size + request.member
    return settings
