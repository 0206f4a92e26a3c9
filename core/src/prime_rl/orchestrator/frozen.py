"""Frozen models of a run: looked for at the start, never launched."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from prime_rl.api.algorithm import Algorithm
from prime_rl.configs.frozen import FrozenModelConfig
from prime_rl.configs.urls import can_be_header
from prime_rl.errors import RunError
from prime_rl.orchestrator.sampling import frozen_client_settings
from prime_rl.orchestrator.scorer import ScoringFailed, TokenScorer, is_local

log = logging.getLogger(__name__)

ATTEMPTS = 10
RETRY_S = 0.5
LOOK_TIMEOUT_S = 10.0


async def find_frozen_model(
    config: FrozenModelConfig,
    label: str,
    *,
    attempts: int = ATTEMPTS,
    retry_s: float = RETRY_S,
    environment: Mapping[str, str] = os.environ,
) -> str:
    """Name under which the endpoint serves. Raises RunError saying what is missing. The key is read
    from `environment`."""
    who = f"the teacher of source {label!r} at {config.base_url}"
    async with httpx.AsyncClient(
        trust_env=not is_local(config.base_url),
        headers=request_headers(config, environment),
        timeout=LOOK_TIMEOUT_S,
    ) as client:
        served = await _served(client, config, who, attempts, retry_s)
    if config.name is None:
        if not served:
            raise RunError(f"{who} lists no model; set teacher.name")
        return served[0]
    if served and config.name not in served:
        raise RunError(
            f"{who} serves {', '.join(served)}, not {config.name!r}; set teacher.name to one of "
            "them, or leave it out"
        )
    return config.name


async def _served(
    client: httpx.AsyncClient, config: FrozenModelConfig, who: str, attempts: int, retry_s: float
) -> list[str]:
    """What `/v1/models` lists; [] where only `/health` answers."""
    reason = ""
    for attempt in range(attempts):
        if attempt:
            await asyncio.sleep(retry_s)
        try:
            answer = await client.get(f"{config.base_url}/v1/models")
            if answer.status_code == 200:
                return [entry["id"] for entry in answer.json()["data"]]
            reason = f"GET /v1/models: HTTP {answer.status_code}: {answer.text[:200]}"
            if answer.status_code in (401, 403):
                raise RunError(
                    f"{who} asks for a key ({reason}); put it into the environment variable "
                    f"{config.api_key_var} (teacher.api_key_var)"
                )
            if (await client.get(f"{config.base_url}/health")).status_code == 200:
                return []
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            reason = f"{type(error).__name__}: {error}"
        except (ValueError, KeyError, TypeError) as error:
            reason = f"GET /v1/models: not the expected JSON ({error!r})"
    raise RunError(
        f"{who} does not answer ({reason}). A run never starts its teacher: start it first, for "
        "instance with `prime serve MODEL_DIR --port 8001`, and name its URL in teacher.base_url"
    )


def request_headers(
    config: FrozenModelConfig, environment: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Headers of every request to the endpoint, its key among them. Raises RunError for a key that
    no header can carry."""
    key = environment.get(config.api_key_var)
    if key and not can_be_header(key):
        raise RunError(
            f"the environment variable {config.api_key_var} (teacher.api_key_var) holds no key: "
            "expected printable ASCII in one line, without spaces at its ends"
        )
    return {**({"Authorization": f"Bearer {key}"} if key else {}), **config.headers}


def frozen_scorer(config: FrozenModelConfig, name: str) -> TokenScorer:
    """A scorer of the endpoint."""
    return TokenScorer(
        config.base_url,
        name,
        headers=request_headers(config),
        timeout_s=config.timeout_s,
        max_concurrent=config.max_concurrent,
    )


async def check_scores(scorer: TokenScorer, label: str) -> None:
    """Let the endpoint score two tokens. Raises RunError when it cannot."""
    try:
        await scorer.score([1, 2])
    except ScoringFailed as error:
        raise RunError(
            f"the teacher of source {label!r} does not score tokens: {error}. It must answer "
            "POST /inference/v1/generate with prompt_logprobs, as `prime serve` and vLLM do"
        ) from error


@dataclass(frozen=True)
class FrozenSource:
    """A training source that a frozen model plays."""

    model: FrozenModelConfig
    name: str
    """Under which the endpoint serves it."""

    def client_settings(self, tokenizer: Path, renderer: str) -> dict[str, Any]:
        """What its episodes are told of the model."""
        return frozen_client_settings(self.model, tokenizer, renderer)


def frozen_sources(
    algorithms: Mapping[str, Algorithm], names: Mapping[str, str]
) -> dict[str, FrozenSource]:
    """The sources that frozen models play; `names` are those that `find_teachers` found."""
    return {
        label: FrozenSource(algorithm.teacher, names[label])
        for label, algorithm in algorithms.items()
        if algorithm.teacher is not None and algorithm.requirements.sampled_by == "frozen"
    }


async def find_teachers(algorithms: Mapping[str, Algorithm]) -> dict[str, str]:
    """Source -> served name of its frozen model. Raises RunError naming the first that is missing."""
    return {
        label: await find_frozen_model(algorithm.teacher, label)
        for label, algorithm in algorithms.items()
        if algorithm.teacher is not None
    }
