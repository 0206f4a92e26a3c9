"""POST /inference/v1/generate: token ids in; ids, log-probabilities, experts and masks out."""

from __future__ import annotations

import time

import numpy
from msgspec import Struct

from prime_rl.inference.admission import build_sequences
from prime_rl.inference.protocol import (
    GenerateRequest,
    RequestError,
    decode,
    refuse_unsupported,
)
from prime_rl.inference.sequence import Sequence
from prime_rl.inference.service import EngineService, Receive


class Candidate(Struct):
    """A likely token at a position."""

    token: str
    logprob: float


class TokenLogprob(Struct):
    """A sampled token; `token` is `token_id:<id>`."""

    token: str
    logprob: float
    top_logprobs: list[Candidate]


class Logprobs(Struct):
    """One entry per sampled token."""

    content: list[TokenLogprob]


class PromptCandidate(Struct):
    """A token at a prompt position."""

    logprob: float
    """Nats, at temperature 1."""
    rank: int
    decoded_token: None = None


class Experts(Struct):
    """Routed experts of positions start .. tokens - 2: the last token has not been computed with.

    `data` comes first and the JSON is compact: clients cut it out of the bytes by that prefix.
    """

    data: bytes
    """Row-major [positions, layers, top_k]; base64 on the wire. The dtype's largest value means
    that the layer has no experts."""
    shape: tuple[int, int, int]
    dtype: str
    start: int


class Usage(Struct):
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Choice(Struct):
    """One completion."""

    index: int
    token_ids: list[int]
    finish_reason: str | None
    stop_reason: int | None
    logprobs: Logprobs
    routed_experts: Experts | None
    sampling_mask: list[list[int]] | None
    """Candidates per sampled token; an empty list stands for the whole vocabulary."""


class GenerateResponse(Struct):
    """The answer; nulls stand for what this engine does not have."""

    request_id: str
    model: str
    created: int
    choices: list[Choice]
    usage: Usage
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[dict[int, PromptCandidate] | None] | None = None
    """Per prompt token, by token id: the token itself first; nothing for the first token."""
    prompt_token_id_logprobs: None = None
    mm_placeholders: None = None
    metrics: None = None
    kv_transfer_params: None = None
    ec_transfer_params: None = None


async def generate(service: EngineService, body: bytes, receive: Receive) -> GenerateResponse:
    """Answer one request. Raises RequestError or ClientGone."""
    request: GenerateRequest = decode(body, GenerateRequest)
    fields = request.sampling_params
    service.limits.check_model(request.model)
    refuse_unsupported(request)
    refuse_unsupported(fields, supported=("prompt_logprobs",))
    if request.stream:
        raise RequestError(400, "stream is not supported here; use /v1/completions to stream")
    if fields.stop:
        raise RequestError(400, "stop needs text; use stop_token_ids here")
    if fields.logprobs == -1:
        raise RequestError(400, "logprobs of the whole vocabulary are not supported")
    sequences = build_sequences(
        service.limits,
        request.token_ids,
        fields,
        request_id=request.request_id,
        max_tokens=fields.max_tokens,
        top_logprobs=fields.logprobs if fields.logprobs and fields.logprobs > 1 else 0,
        prompt_tops=fields.prompt_logprobs,
    )
    await service.complete(sequences, receive)
    first = fields.routed_experts_prompt_start or 0
    return GenerateResponse(
        request_id=sequences[0].request_id,
        model=service.limits.served_names[0],
        created=int(time.time()),
        choices=[
            _choice(index, sequence, first, service.limits.experts_dtype)
            for index, sequence in enumerate(sequences)
        ],
        usage=usage_of(sequences),
        prompt_token_ids=request.token_ids if request.return_token_ids else None,
        prompt_logprobs=_prompt_logprobs(sequences[0]),
    )


def usage_of(sequences: list[Sequence]) -> Usage:
    """Counts over all completions of one prompt."""
    prompt = sequences[0].prompt_length
    completion = sum(len(sequence.logprobs) for sequence in sequences)
    return Usage(prompt, completion, prompt + completion)


def _prompt_logprobs(sequence: Sequence) -> list[dict[int, PromptCandidate] | None] | None:
    if sequence.prompt_scores is None:
        return None
    found: list[dict[int, PromptCandidate] | None] = []
    for scores in sequence.prompt_scores:
        candidates: dict[int, PromptCandidate] = {}
        for score in scores:  # the token itself may be among the likeliest
            candidates.setdefault(score.token, PromptCandidate(score.logprob, score.rank))
        found.append(candidates or None)
    return found


def _choice(index: int, sequence: Sequence, first: int, experts_dtype: str) -> Choice:
    tokens = sequence.completion
    no_tops: list[list[tuple[int, float]]] = [[]] * len(tokens)
    return Choice(
        index=index,
        token_ids=tokens,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_token,
        logprobs=Logprobs(
            [
                TokenLogprob(
                    f"token_id:{token}",
                    logprob,
                    [Candidate(f"token_id:{other}", value) for other, value in top],
                )
                for token, logprob, top in zip(
                    tokens,
                    sequence.logprobs,
                    sequence.top_logprobs or no_tops,
                    strict=True,
                )
            ]
        ),
        routed_experts=_experts(sequence, first, experts_dtype) if sequence.routes else None,
        sampling_mask=sequence.kept if sequence.wants_kept else None,
    )


def _experts(sequence: Sequence, first: int, dtype: str) -> Experts:
    rows = numpy.concatenate(sequence.routes)[first : len(sequence.tokens) - 1]
    packed = rows.astype(dtype)  # -1 wraps to the largest value
    return Experts(packed.tobytes(), packed.shape, dtype, min(first, len(sequence.tokens) - 1))
