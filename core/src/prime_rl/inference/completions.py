"""POST /v1/chat/completions, /v1/completions and /tokenize: OpenAI's interface over text."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from starlette.responses import Response, StreamingResponse

from prime_rl.inference.admission import build_sequences
from prime_rl.inference.generate import usage_of
from prime_rl.inference.openai_format import ChatFormat, CompletionFormat, Format
from prime_rl.inference.protocol import (
    ChatRequest,
    CompletionRequest,
    Message,
    OpenAIFields,
    RequestError,
    TokenizeRequest,
    decode,
    refuse_unsupported,
)
from prime_rl.inference.sequence import Sequence
from prime_rl.inference.service import EngineService, Receive
from prime_rl.inference.streaming import events
from prime_rl.inference.text import StopStrings


async def chat(service: EngineService, body: bytes, receive: Receive) -> Any:
    """Answer a conversation."""
    request: ChatRequest = decode(body, ChatRequest)
    service.limits.check_model(request.model)
    refuse_unsupported(request)
    if request.continue_final_message and request.add_generation_prompt:
        raise RequestError(
            400, "continue_final_message and add_generation_prompt exclude each other"
        )
    prompt = await _render(service, request.messages, request)
    if request.top_logprobs and not request.logprobs:
        raise RequestError(400, "top_logprobs needs logprobs = true")
    if request.max_tokens and request.max_completion_tokens:
        raise RequestError(400, "max_tokens and max_completion_tokens mean the same; give one")
    sequences, stops = await _sequences(
        service,
        prompt,
        request,
        max_tokens=request.max_completion_tokens or request.max_tokens,
        top_logprobs=request.top_logprobs or 0,
    )
    writer = ChatFormat(
        tokenizer=await service.tokenizer.load(),
        fields=request,
        model=service.limits.served_names[0],
        created=int(time.time()),
        stops=stops,
        with_logprobs=bool(request.logprobs),
    )
    return await _answer(service, writer, [sequences], receive)


async def complete(service: EngineService, body: bytes, receive: Receive) -> Any:
    """Continue one prompt or several."""
    request: CompletionRequest = decode(body, CompletionRequest)
    service.limits.check_model(request.model)
    refuse_unsupported(request)
    groups: list[list[Sequence]] = []
    stops: StopStrings | None = None
    for prompt in await _prompts(service, request):
        sequences, stops = await _sequences(
            service,
            prompt,
            request,
            max_tokens=16 if request.max_tokens is None else request.max_tokens,
            top_logprobs=request.logprobs or 0,
        )
        groups.append(sequences)
    writer = CompletionFormat(
        tokenizer=await service.tokenizer.load(),
        fields=request,
        model=service.limits.served_names[0],
        created=int(time.time()),
        stops=stops,
        with_logprobs=request.logprobs is not None,
    )
    return await _answer(service, writer, groups, receive)


async def tokenize(service: EngineService, body: bytes, _: Receive) -> dict[str, Any]:
    """Token ids of a text or a conversation."""
    request: TokenizeRequest = decode(body, TokenizeRequest)
    service.limits.check_model(request.model)
    if (request.prompt is None) == (request.messages is None):
        raise RequestError(400, "give either prompt or messages")
    if request.messages is not None:
        ids = await service.tokenizer.render(
            request.messages,
            request.add_generation_prompt is not False,
            request.chat_template_kwargs or {},
        )
    else:
        assert request.prompt is not None
        ids = await service.tokenizer.encode(
            request.prompt, request.add_special_tokens is not False
        )
    strings = None
    if request.return_token_strs:
        strings = (await service.tokenizer.load()).convert_ids_to_tokens(ids)
    return {
        "count": len(ids),
        "max_model_len": service.limits.max_model_len,
        "tokens": ids,
        "token_strs": strings,
    }


async def _render(
    service: EngineService, messages: list[Message], request: ChatRequest
) -> list[int]:
    arguments = dict(request.chat_template_kwargs or {})
    if request.continue_final_message:
        arguments["continue_final_message"] = True
    wants_prompt = request.add_generation_prompt
    if wants_prompt is None:
        wants_prompt = not request.continue_final_message
    return await service.tokenizer.render(messages, wants_prompt, arguments)


async def _prompts(service: EngineService, request: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt of a request: a text, several, token ids, or several of those."""
    prompt = request.prompt
    items: list[Any] = [prompt] if isinstance(prompt, str) else prompt
    if not items:
        raise RequestError(400, "the prompt is empty")
    kinds = {type(item) for item in items}
    if len(kinds) > 1:
        raise RequestError(400, "prompt mixes texts and token ids; give one kind")
    if kinds == {int}:
        return [items]
    if kinds == {list}:
        return items
    special = request.add_special_tokens is not False
    return [await service.tokenizer.encode(item, special) for item in items]


async def _sequences(
    service: EngineService,
    prompt: list[int],
    request: OpenAIFields,
    *,
    max_tokens: int | None,
    top_logprobs: int,
) -> tuple[list[Sequence], StopStrings | None]:
    strings = [request.stop] if isinstance(request.stop, str) else list(request.stop or [])
    stops: StopStrings | None = None
    check: Callable[[list[int]], bool] | None = None
    if any(strings):
        tokenizer = await service.tokenizer.load()
        stops = StopStrings(tokenizer, strings, request.skip_special_tokens is not False)
        check = stops
    sequences = build_sequences(
        service.limits,
        prompt,
        request,
        request_id=request.request_id,
        max_tokens=max_tokens,
        top_logprobs=top_logprobs,
        is_stopped_by_text=check,
    )
    return sequences, stops


async def _answer(
    service: EngineService, writer: Format, groups: list[list[Sequence]], receive: Receive
) -> Any:
    sequences = [sequence for group in groups for sequence in group]
    fields = writer.fields
    if fields.stream:
        progress = service.stream(sequences)
        return StreamingResponse(events(writer, groups, progress), media_type="text/event-stream")
    if fields.stream_options is not None:
        raise RequestError(400, "stream_options needs stream = true")
    await service.complete(sequences, receive)
    usages = [usage_of(group) for group in groups]
    return Response(writer.whole(sequences, usages), media_type="application/json")
