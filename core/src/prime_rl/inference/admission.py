"""Turns request bodies into sequences: checks against the model's limits, seeds, stop tokens."""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.inference.protocol import RequestError, SamplingFields
from prime_rl.inference.sequence import SamplingParams, Sequence

LEAST_TEMPERATURE = 0.01
"""Below this the scaled logits overflow; 0 is greedy."""


@dataclass
class Limits:
    """What the model and the settings of this engine allow."""

    served_names: tuple[str, ...]
    """Names a request may use for the model, the official one first."""
    vocab_size: int
    max_model_len: int
    stop_token_ids: frozenset[int]
    """Tokens that end a completion unless `ignore_eos`."""
    returns_kept: bool
    """Record sampling masks."""
    returns_routes: bool
    """Record routed experts."""
    seeds: random.Random
    """Where requests without a seed get theirs."""
    experts_dtype: str = "uint16"
    """Of returned experts: uint8 when 255 is no expert's number, else uint16."""

    def check_model(self, name: str | None) -> None:
        """Raise RequestError unless the request means this model."""
        if name is not None and name not in self.served_names:
            raise RequestError(
                404,
                f"the model {name!r} does not exist; this engine serves {self.served_names[0]!r}",
            )

    def check_prompt(self, token_ids: list[int], room: int = 1) -> None:
        """Raise RequestError for a prompt that leaves no place for `room` tokens."""
        if not token_ids:
            raise RequestError(400, "the prompt has no tokens")
        if len(token_ids) + room > self.max_model_len:
            raise RequestError(
                400,
                f"the prompt has {len(token_ids)} tokens; the maximum context length is "
                f"{self.max_model_len} tokens, prompt and completion together",
            )
        largest = max(token_ids)
        if largest >= self.vocab_size:
            raise RequestError(
                400, f"token id {largest} is outside the vocabulary of {self.vocab_size} tokens"
            )


def build_sequences(
    limits: Limits,
    token_ids: list[int],
    fields: SamplingFields,
    *,
    request_id: str | None,
    max_tokens: int | None,
    top_logprobs: int,
    prompt_tops: int | None = None,
    is_stopped_by_text: Callable[[list[int]], bool] | None = None,
) -> list[Sequence]:
    """The `n` sequences of a request; the first one scores the prompt. Raises RequestError."""
    # To be scored, a prompt may fill the context: the token after it is never computed with.
    limits.check_prompt(token_ids, room=0 if prompt_tops is not None and max_tokens == 1 else 1)
    temperature = 1.0 if fields.temperature is None else fields.temperature
    if 0 < temperature < LEAST_TEMPERATURE:
        raise RequestError(
            400, f"temperature {temperature} is below {LEAST_TEMPERATURE}; use 0 for greedy"
        )
    room = limits.max_model_len - len(token_ids)
    most = max(1, room if max_tokens is None else min(max_tokens, room))
    stop_token_ids = frozenset(fields.stop_token_ids or ())
    if not fields.ignore_eos:
        stop_token_ids |= limits.stop_token_ids
    outside = [token for token in stop_token_ids if token >= limits.vocab_size]
    if outside:
        raise RequestError(
            400,
            f"stop token id {outside[0]} is outside the vocabulary of {limits.vocab_size} tokens",
        )
    if fields.min_tokens and fields.min_tokens > most:
        raise RequestError(
            400, f"min_tokens is {fields.min_tokens}, but at most {most} tokens can follow"
        )
    seed = limits.seeds.getrandbits(63) if fields.seed is None else fields.seed
    name = request_id or uuid.uuid4().hex
    return [
        Sequence(
            request_id=name,
            tokens=list(token_ids),
            prompt_length=len(token_ids),
            params=SamplingParams(
                max_tokens=most,
                temperature=temperature,
                top_p=1.0 if fields.top_p is None else fields.top_p,
                top_k=max(fields.top_k or 0, 0),
                min_p=fields.min_p or 0.0,
                min_tokens=fields.min_tokens or 0,
                stop_token_ids=stop_token_ids,
                seed=seed + index,
                top_logprobs=top_logprobs,
            ),
            is_stopped_by_text=is_stopped_by_text,
            wants_kept=limits.returns_kept,
            wants_routes=limits.returns_routes,
            prompt_tops=prompt_tops if index == 0 else None,
        )
        for index in range(fields.n or 1)
    ]


def stop_tokens_of(model_dir: Path) -> frozenset[int]:
    """End-of-sequence ids that the checkpoint names: in generation_config.json and config.json, and
    the tokenizer's end token."""
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = _read_json(model_dir / name).get("eos_token_id")
        found.update(value if isinstance(value, list) else [] if value is None else [value])
    end = _read_json(model_dir / "tokenizer_config.json").get("eos_token")
    text = end.get("content") if isinstance(end, dict) else end
    for token in _read_json(model_dir / "tokenizer.json").get("added_tokens", []):
        if text is not None and token.get("content") == text:
            found.add(token["id"])
    return frozenset(token for token in found if isinstance(token, int))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    loaded = json.loads(path.read_text(encoding="utf-8"))
    return loaded if isinstance(loaded, dict) else {}
