"""Server-sent events of the OpenAI endpoints."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from prime_rl.inference.engine_loop import ENDED, Progress
from prime_rl.inference.generate import usage_of
from prime_rl.inference.openai_format import Format, total
from prime_rl.inference.sequence import Sequence
from prime_rl.inference.text import TextStream

DONE = b"data: [DONE]\n\n"


class ChoiceStream:
    """What has been sent of one completion."""

    def __init__(self, writer: Format, index: int, sequence: Sequence) -> None:
        self.writer = writer
        self.index = index
        self.sequence = sequence
        self._text = TextStream(writer.tokenizer, writer.skip_special_tokens)
        self._raw = ""
        self._sent_characters = 0
        self._sent_tokens = 0
        self._is_first = True

    def advance(self, length: int) -> dict[str, Any] | None:
        """The next piece once the sequence has `length` tokens (or ENDED); None: nothing yet."""
        is_last = length == ENDED
        sequence, writer = self.sequence, self.writer
        tokens = (
            sequence.completion if is_last else sequence.tokens[sequence.prompt_length : length]
        )
        shown = tokens
        is_ended_by_token = is_last and sequence.stop_token is not None
        if is_ended_by_token and not writer.fields.include_stop_str_in_output:
            shown = tokens[:-1]
        self._raw += self._text.push(shown, is_last)
        text = self._raw
        if writer.stops is not None and not writer.fields.include_stop_str_in_output:
            text = writer.stops.cut(text)
            if not is_last:
                text = writer.stops.without_beginning(text)
        new = text[self._sent_characters :]
        if not new and not is_last:
            return None
        piece = writer.piece(
            self.index, sequence, new, self._sent_tokens, len(tokens), self._is_first
        )
        if is_last:
            piece["finish_reason"] = sequence.finish_reason
            piece["stop_reason"] = sequence.stop_token
        self._sent_characters = max(len(text), self._sent_characters)
        self._sent_tokens = len(tokens)
        self._is_first = False
        return piece


async def events(
    writer: Format, groups: list[list[Sequence]], progress: AsyncGenerator[Progress, None]
) -> AsyncGenerator[bytes, None]:
    """The event stream of one request; a group is one prompt's completions."""
    sequences = [sequence for group in groups for sequence in group]
    streams = {
        id(sequence): ChoiceStream(writer, index, sequence)
        for index, sequence in enumerate(sequences)
    }
    envelope = writer.envelope(sequences, True)
    is_first = True
    async with aclosing(progress):
        async for sequence, length in progress:
            if length == ENDED and sequence.finish_reason == "error":
                error = {"message": f"generation failed: {sequence.error}", "code": 500}
                yield _event({"error": error})
                break
            piece = streams[id(sequence)].advance(length)
            if piece is None:
                continue
            chunk = {**envelope, "choices": [piece]}
            if is_first and writer.fields.return_token_ids:
                chunk["prompt_token_ids"] = sequence.tokens[: sequence.prompt_length]
            is_first = False
            yield _event(chunk)
        options = writer.fields.stream_options
        if options is not None and options.include_usage:
            usage = total([usage_of(group) for group in groups])
            yield _event({**envelope, "choices": [], "usage": usage})
        yield DONE


def _event(content: object) -> bytes:
    return b"data: " + msgspec.json.encode(content) + b"\n\n"
