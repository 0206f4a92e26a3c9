"""The HTTP application: routes, bounded bodies, and one form of error answer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from prime_rl.inference import admin, completions, generate
from prime_rl.inference.metrics import metrics_text
from prime_rl.inference.protocol import RequestError
from prime_rl.inference.service import ClientGone, EngineService

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0
"""A client that takes longer to send its request is cut off."""
CLIENT_CLOSED = 499
_KINDS = {400: "BadRequestError", 404: "NotFoundError", 503: "ServiceUnavailableError"}

Work = Callable[[EngineService, bytes, Any], Awaitable[Any]]


def build_application(service: EngineService) -> Starlette:
    """The ASGI application of one engine."""

    def post(path: str, work: Work) -> Route:
        async def handle(request: Request) -> Response:
            body = await _read_body(request, service.max_body_bytes)
            return as_response(await work(service, body, request.receive))

        return Route(path, handle, methods=["POST"])

    def get(path: str, work: Callable[[], Any]) -> Route:
        async def handle(_: Request) -> Response:
            return as_response(work())

        return Route(path, handle, methods=["GET"])

    async def pause(request: Request) -> Response:
        return as_response(await admin.pause(service, dict(request.query_params)))

    return Starlette(
        routes=[
            post("/inference/v1/generate", generate.generate),
            post("/v1/chat/completions", completions.chat),
            post("/v1/completions", completions.complete),
            post("/tokenize", completions.tokenize),
            post("/resume", admin.resume),
            post("/update_weights", admin.update_weights),
            post("/abort_requests", admin.abort_requests),
            Route("/pause", pause, methods=["POST"]),
            get("/is_paused", lambda: {"is_paused": service.loop.is_paused}),
            get("/weight_info", lambda: {"weight_version": str(service.weights.version)}),
            get("/v1/models", lambda: admin.models(service)),
            get("/health", lambda: admin.health(service)),
            get("/liveness", lambda: admin.liveness(service)),
            get("/metrics", lambda: PlainTextResponse(metrics_text(service))),
        ],
        exception_handlers={
            RequestError: _answer_request_error,
            HTTPException: _answer_http_exception,
            ClientGone: _answer_nobody,
            ClientDisconnect: _answer_nobody,
        },
    )


def as_response(result: Any) -> Response:
    """The result as compact JSON, unless it is an answer already."""
    if isinstance(result, Response):
        return result
    return Response(msgspec.json.encode(result), media_type="application/json")


def error_response(status: int, message: str, headers: dict[str, str] | None = None) -> Response:
    """The error body of OpenAI and vLLM."""
    kind = _KINDS.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    error = {"message": message, "type": kind, "param": None, "code": status}
    return Response(
        msgspec.json.encode({"error": error}),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


async def _read_body(request: Request, most: int) -> bytes:
    """The request's body. Raises RequestError when it is too large or too slow."""
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > most:
        raise RequestError(413, f"the body has {declared} bytes, at most {most} are taken")
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for part in request.stream():
                size += len(part)
                if size > most:
                    raise RequestError(413, f"the body has more than {most} bytes")
                parts.append(part)
    except TimeoutError:
        raise RequestError(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from None
    return b"".join(parts)


async def _answer_request_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    headers = None
    if error.retry_after_s is not None:
        headers = {"Retry-After": str(error.retry_after_s)}
    return error_response(error.status, error.message, headers)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    return error_response(error.status_code, text, dict(error.headers or {}))


async def _answer_nobody(_: Request, __: Exception) -> Response:
    return Response(status_code=CLIENT_CLOSED)
