"""The answers of the OpenAI endpoints: whole or in pieces, for chat and for plain completions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import msgspec

from prime_rl.inference.generate import Usage
from prime_rl.inference.protocol import OpenAIFields
from prime_rl.inference.sequence import Sequence
from prime_rl.inference.text import StopStrings


@dataclass
class Format(ABC):
    """Writes one request's answer."""

    tokenizer: Any
    fields: OpenAIFields
    model: str
    created: int
    stops: StopStrings | None
    with_logprobs: bool

    @abstractmethod
    def whole(self, sequences: list[Sequence], usages: list[Usage]) -> bytes:
        """The body of an answer that is not streamed."""

    @abstractmethod
    def piece(
        self, index: int, sequence: Sequence, text: str, start: int, end: int, is_first: bool
    ) -> dict[str, Any]:
        """One streamed choice: `text` and the completion's tokens start .. end - 1."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, str, str]:
        """(id prefix, object of a whole answer, object of a piece)."""

    @property
    def skip_special_tokens(self) -> bool:
        """Whether special tokens are left out of the text."""
        return self.fields.skip_special_tokens is not False

    def text_of(self, sequence: Sequence) -> str:
        """The completion as text, without the token or string that stopped it."""
        tokens = sequence.completion
        if sequence.stop_token is not None and not self.fields.include_stop_str_in_output:
            tokens = tokens[:-1]
        text = self.tokenizer.decode(tokens, skip_special_tokens=self.skip_special_tokens)
        if self.stops is not None and not self.fields.include_stop_str_in_output:
            text = self.stops.cut(text)
        return str(text)

    def envelope(self, sequences: list[Sequence], is_piece: bool) -> dict[str, Any]:
        """The outer fields."""
        prefix, whole, piece = self.names
        return {
            "id": f"{prefix}-{sequences[0].request_id}",
            "object": piece if is_piece else whole,
            "created": self.created,
            "model": self.model,
        }

    def token_name(self, token: int) -> str:
        """A token as logprobs name it."""
        if self.fields.return_tokens_as_token_ids:
            return f"token_id:{token}"
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def total(usages: list[Usage]) -> dict[str, int]:
    """Counts of a whole request."""
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
    }


class ChatFormat(Format):
    """chat.completion and chat.completion.chunk."""

    names = ("chatcmpl", "chat.completion", "chat.completion.chunk")

    def whole(self, sequences: list[Sequence], usages: list[Usage]) -> bytes:
        """As `Format.whole`."""
        choices = []
        for index, sequence in enumerate(sequences):
            message = {"role": "assistant", "content": self.text_of(sequence)}
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self._logprobs(sequence, 0, len(sequence.logprobs)),
                    "finish_reason": sequence.finish_reason,
                    "stop_reason": sequence.stop_token,
                    "token_ids": sequence.completion if self.fields.return_token_ids else None,
                }
            )
        prompt = sequences[0].tokens[: sequences[0].prompt_length]
        answer = {
            **self.envelope(sequences, False),
            "choices": choices,
            "usage": total(usages),
            "prompt_token_ids": prompt if self.fields.return_token_ids else None,
        }
        return msgspec.json.encode(answer)

    def piece(
        self, index: int, sequence: Sequence, text: str, start: int, end: int, is_first: bool
    ) -> dict[str, Any]:
        """As `Format.piece`."""
        delta = {"content": text}
        if is_first:
            delta = {"role": "assistant", "content": text}
        choice: dict[str, Any] = {"index": index, "delta": delta, "finish_reason": None}
        choice["logprobs"] = self._logprobs(sequence, start, end)
        if self.fields.return_token_ids:
            choice["token_ids"] = sequence.completion[start:end]
        return choice

    def _logprobs(self, sequence: Sequence, start: int, end: int) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        tokens = sequence.completion
        content = []
        for place in range(start, end):
            tops = sequence.top_logprobs[place] if sequence.top_logprobs else []
            entry = self._entry(tokens[place], sequence.logprobs[place])
            entry["top_logprobs"] = [self._entry(token, value) for token, value in tops]
            content.append(entry)
        return {"content": content}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        name = self.token_name(token)
        return {"token": name, "logprob": logprob, "bytes": list(name.encode())}


class CompletionFormat(Format):
    """text_completion, whole and in pieces."""

    names = ("cmpl", "text_completion", "text_completion")

    def whole(self, sequences: list[Sequence], usages: list[Usage]) -> bytes:
        """As `Format.whole`."""
        choices = []
        for index, sequence in enumerate(sequences):
            choice = self.piece(
                index, sequence, self.text_of(sequence), 0, len(sequence.logprobs), True
            )
            choice["finish_reason"] = sequence.finish_reason
            choice["stop_reason"] = sequence.stop_token
            choices.append(choice)
        answer = {
            **self.envelope(sequences, False),
            "choices": choices,
            "usage": total(usages),
        }
        return msgspec.json.encode(answer)

    def piece(
        self, index: int, sequence: Sequence, text: str, start: int, end: int, is_first: bool
    ) -> dict[str, Any]:
        """As `Format.piece`."""
        choice: dict[str, Any] = {"index": index, "text": text, "finish_reason": None}
        choice["logprobs"] = self._logprobs(sequence, start, end)
        if self.fields.return_token_ids:
            choice["token_ids"] = sequence.completion[start:end]
            choice["prompt_token_ids"] = (
                sequence.tokens[: sequence.prompt_length] if is_first else None
            )
        return choice

    def _logprobs(self, sequence: Sequence, start: int, end: int) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        tokens = sequence.completion[start:end]
        names = [self.token_name(token) for token in tokens]
        offsets = [0]
        for name in names[:-1]:
            offsets.append(offsets[-1] + len(name))
        tops = sequence.top_logprobs[start:end] if sequence.top_logprobs else [[]] * len(tokens)
        return {
            "tokens": names,
            "token_logprobs": sequence.logprobs[start:end],
            "top_logprobs": [{self.token_name(t): value for t, value in top} for top in tops],
            "text_offset": offsets[: len(names)],
        }
