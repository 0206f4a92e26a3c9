"""Asks an engine how likely its model finds given tokens."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import httpx

log = logging.getLogger(__name__)

ATTEMPTS = 4
FIRST_RETRY_S = 0.5
"""Wait before the second attempt; each later one is twice as long."""
RETRIED_STATUS = (408, 425, 429)
"""Refusals of the moment, beside all of 500 and above."""


def is_local(url: str) -> bool:
    """The host is this machine: no proxy leads there."""
    return httpx.URL(url).host in ("127.0.0.1", "localhost", "::1")


class ScoringFailed(RuntimeError):
    """The engine gave no usable answer, however often it was asked."""


class TokenScorer:
    """One endpoint that answers `/inference/v1/generate` with `prompt_logprobs`.

    At most `max_concurrent` requests run at once; failures of the network and of the moment are
    tried again, `ATTEMPTS` times in all.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        max_concurrent: int = 32,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        self.model = model
        self._url = f"{base_url}/inference/v1/generate"
        self._slots = asyncio.Semaphore(max_concurrent)
        self._first_retry_s = first_retry_s
        self._client = httpx.AsyncClient(
            trust_env=not is_local(base_url),
            headers=dict(headers or {}),
            timeout=timeout_s,
            limits=httpx.Limits(max_connections=max_concurrent),
        )

    async def close(self) -> None:
        """Release the connections."""
        await self._client.aclose()

    async def score(self, token_ids: Sequence[int], session_id: str = "") -> list[float]:
        """Log-probability of every token after those before it, nats, at temperature 1; 0.0 for the
        first. Raises ScoringFailed."""
        body: dict[str, Any] = {
            "model": self.model,
            "token_ids": list(token_ids),
            "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
        }
        headers = {"X-Session-ID": session_id} if session_id else {}
        async with self._slots:
            answer = await self._post(body, headers)
        return read_scores(answer, token_ids)

    async def _post(self, body: Mapping[str, Any], headers: Mapping[str, str]) -> Any:
        wait_s = self._first_retry_s
        for attempt in range(1, ATTEMPTS + 1):
            try:
                response = await self._client.post(self._url, json=body, headers=headers)
                reason = f"HTTP {response.status_code}: {response.text[:300]}"
                if response.status_code == 200:
                    return response.json()
                if response.status_code < 500 and response.status_code not in RETRIED_STATUS:
                    raise ScoringFailed(f"{self._url} refuses: {reason}")
            except httpx.HTTPError as error:
                reason = f"{type(error).__name__}: {error}"
            except ValueError as error:
                raise ScoringFailed(f"{self._url} answers no JSON: {error}") from error
            if attempt < ATTEMPTS:
                await asyncio.sleep(wait_s)
                wait_s *= 2
        raise ScoringFailed(f"{self._url} failed {ATTEMPTS} times; the last time: {reason}")


def read_scores(answer: Any, token_ids: Sequence[int]) -> list[float]:
    """The prompt's own log-probabilities out of an answer. Raises ScoringFailed naming what is
    missing: an engine may leave them out without a word."""
    found = answer.get("prompt_logprobs") if isinstance(answer, dict) else None
    if not isinstance(found, list) or len(found) != len(token_ids):
        count = f"{len(found)} entries" if isinstance(found, list) else repr(found)
        raise ScoringFailed(
            f"the engine answered prompt_logprobs = {count}, expected one entry for each of "
            f"{len(token_ids)} tokens; does it support sampling_params.prompt_logprobs?"
        )
    scores = [0.0]
    for place, (candidates, token) in enumerate(zip(found[1:], token_ids[1:], strict=True), 1):
        entry = candidates.get(str(token)) if isinstance(candidates, dict) else None
        value = entry.get("logprob") if isinstance(entry, dict) else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise ScoringFailed(
                f"the engine gave {value!r} as log-probability of token {token} at position "
                f"{place}, expected a finite number"
            )
        scores.append(float(value))
    return scores
