"""Health, models, and what the control plane asks: pause, resume, abort, new weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from prime_rl.errors import PrimeError
from prime_rl.inference.engine_loop import EngineStopped, PauseMode
from prime_rl.inference.protocol import (
    AbortRequest,
    RequestError,
    UpdateWeightsRequest,
    decode,
)
from prime_rl.inference.service import EngineService, Receive

MODES: tuple[PauseMode, ...] = ("keep", "abort", "wait")
BOOLEANS = {"true": True, "1": True, "false": False, "0": False}


def health(service: EngineService) -> dict[str, str]:
    """Raises RequestError 503 when this engine cannot generate."""
    if service.problem is not None:
        raise RequestError(503, f"this engine cannot generate: {service.problem}")
    return {"status": "ok"}


def liveness(service: EngineService) -> dict[str, str]:
    """Raises RequestError 503 when the engine thread has ended."""
    if service.loop.failure is not None:
        raise RequestError(503, f"the engine ended: {service.loop.failure}")
    return {"status": "ok"}


def models(service: EngineService) -> dict[str, Any]:
    """The one model, as OpenAI lists models."""
    name = service.limits.served_names[0]
    card = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "prime-rl",
        "root": service.limits.served_names[-1],
        "parent": None,
        "max_model_len": service.limits.max_model_len,
    }
    return {"object": "list", "data": [card]}


async def pause(service: EngineService, query: dict[str, str]) -> dict[str, str]:
    """POST /pause?mode=keep|abort|wait&clear_cache=true|false; mode defaults to abort, as in vLLM."""
    unknown = sorted(set(query) - {"mode", "clear_cache", "wait_for_inflight_requests"})
    if unknown:
        raise RequestError(400, f"unknown query parameter {unknown[0]!r}")
    mode = query.get("mode", "abort")
    if mode not in MODES:
        raise RequestError(400, f"mode is {mode!r}, expected one of {', '.join(MODES)}")
    clear = query.get("clear_cache", "true").lower()
    if clear not in BOOLEANS:
        raise RequestError(400, f"clear_cache is {clear!r}, expected true or false")
    await _result(service.loop.pause(mode, BOOLEANS[clear]))
    return {"status": "paused"}


async def resume(service: EngineService, _: bytes, __: Receive) -> dict[str, str]:
    """POST /resume."""
    await _result(service.loop.resume())
    return {"status": "resumed"}


async def abort_requests(service: EngineService, body: bytes, _: Receive) -> dict[str, Any]:
    """POST /abort_requests."""
    ids = set(decode(body or b"{}", AbortRequest).request_ids)
    count = await _result(
        service.loop.abort(lambda sequence: not ids or sequence.request_id in ids)
    )
    return {"status": "ok", "aborted": count}


async def update_weights(service: EngineService, body: bytes, _: Receive) -> dict[str, Any]:
    """POST /update_weights."""
    info = decode(body, UpdateWeightsRequest).update_info
    update = service.loop.between_steps(
        lambda: service.weights.apply(info.version, Path(info.directory))
    )
    try:
        await _result(update)
    except PrimeError as error:
        raise RequestError(500, f"version {info.version} was not taken: {error}") from error
    return {"status": "ok", "weight_version": str(service.weights.version)}


async def _result(future: Any) -> Any:
    try:
        return await asyncio.wrap_future(future)
    except EngineStopped as error:
        raise RequestError(503, f"the engine ended: {error}") from None
