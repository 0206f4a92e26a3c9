"""What clients may send: the request bodies of vLLM's and OpenAI's HTTP interfaces.

Fields we do not act on are listed so that the answer can say so by name; unknown fields fail.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]


class SamplingFields(Struct, kw_only=True, forbid_unknown_fields=True):
    """How to sample; the same names on every endpoint."""

    temperature: Annotated[float, Meta(ge=0, le=100)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 mean all."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    seed: Seed | None = None
    n: Annotated[int, Meta(ge=1, le=1024)] | None = None
    stop: str | list[str] | None = None
    routed_experts_prompt_start: Annotated[int, Meta(ge=0)] | None = None
    """First prompt position whose experts are returned."""
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    """There is no prefix cache, so nothing changes."""
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    structured_outputs: Any = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None


class GenerateSampling(SamplingFields, kw_only=True):
    """`sampling_params` of /inference/v1/generate."""

    logprobs: Annotated[int, Meta(ge=-1, le=20)] | None = None
    """Every sampled token's log-probability comes in any case; above 1 also the likeliest ones."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    """Also score the prompt's tokens, at temperature 1 whatever the sampling parameters say; above
    0 also the likeliest ones at every position."""
    detokenize: bool | None = None
    flat_logprobs: bool | None = None


class GenerateRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /inference/v1/generate."""

    token_ids: TokenIds
    sampling_params: GenerateSampling
    model: str | None = None
    request_id: str | None = None
    stream: bool | None = None
    stream_options: Any = None
    cache_salt: str | None = None
    priority: int | None = None
    return_token_ids: bool | None = None
    features: Any = None
    content_parts: Any = None
    kv_transfer_params: Any = None
    ec_transfer_params: Any = None
    token_offsets: Any = None


class StreamOptions(Struct, kw_only=True):
    """`stream_options` of the OpenAI endpoints."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class OpenAIFields(SamplingFields, kw_only=True):
    """Fields that chat and completions share."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    user: str | None = None
    metadata: Any = None
    store: bool | None = None


class ContentPart(Struct, kw_only=True):
    """A part of a message."""

    type: str
    text: str | None = None


class Message(Struct, kw_only=True, omit_defaults=True):
    """A chat message; fields beyond these are dropped."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatRequest(OpenAIFields, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    chat_template: str | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    reasoning_effort: str | None = None


class CompletionRequest(OpenAIFields, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[str | TokenId | TokenIds]
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None


class TokenizeRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class UpdateInfo(Struct, kw_only=True, forbid_unknown_fields=True):
    """Which weights to take."""

    version: Annotated[int, Meta(ge=0)]
    directory: str


class UpdateWeightsRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /update_weights."""

    update_info: UpdateInfo


class AbortRequest(Struct, kw_only=True, forbid_unknown_fields=True):
    """POST /abort_requests; an empty list means all."""

    request_ids: list[str] = []


class RequestError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.retry_after_s = retry_after_s


NEUTRAL: dict[str, tuple[Any, ...]] = {
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "structured_outputs": (),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
    "priority": (0,),
    "flat_logprobs": (False,),
    "features": (),
    "content_parts": (),
    "kv_transfer_params": (),
    "ec_transfer_params": (),
    "token_offsets": (),
    "chat_template": (),
    "tools": ([],),
    "tool_choice": ("none",),
    "response_format": ({"type": "text"},),
    "reasoning_effort": (),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
}
"""Fields we know and do not act on, with the values that ask for nothing (None always does)."""


def refuse_unsupported(fields: Struct, supported: tuple[str, ...] = ()) -> None:
    """Raise RequestError naming the first field whose value asks for what this engine lacks."""
    for name in fields.__struct_fields__:
        if name not in NEUTRAL or name in supported:
            continue
        value = getattr(fields, name)
        if value is not None and value not in NEUTRAL[name]:
            raise RequestError(400, f"{name} is not supported by this engine; leave it out")


def decode(body: bytes, kind: type[Any]) -> Any:
    """The body as `kind`. Raises RequestError saying what was found and where."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(400, f"the request body is not valid: {error}") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(400, f"the request body is no JSON: {error}") from None
