"""Between text and tokens: chat template, decoding as tokens arrive, stop strings."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from prime_rl.inference.protocol import Message, RequestError

REPLACEMENT = "\ufffd"
"""What an unfinished character decodes to."""


class TextTokenizer:
    """The model directory's tokenizer, loaded at the first request that needs text.

    A fast tokenizer must not encode in two threads at once, so one thread of its own does.
    """

    def __init__(self, directory: Path, trust_remote_code: bool = False) -> None:
        self.directory = directory
        self.trust_remote_code = trust_remote_code
        self._tokenizer: Any = None
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")

    async def load(self) -> Any:
        """The tokenizer. Raises RequestError when the directory holds none."""
        if self._tokenizer is None:
            self._tokenizer = await self._do(self._load)
        return self._tokenizer

    async def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        tokenizer = await self.load()
        ids: list[int] = await self._do(
            lambda: tokenizer.encode(text, add_special_tokens=add_special_tokens)
        )
        return ids

    async def render(
        self, messages: list[Message], generation_prompt: bool, arguments: dict[str, Any]
    ) -> list[int]:
        """Token ids of a conversation through the chat template. Raises RequestError."""
        tokenizer = await self.load()
        plain = [_plain(message) for message in messages]
        return await self._do(lambda: _render(tokenizer, plain, generation_prompt, arguments))

    async def _do(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _load(self) -> Any:
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(
                str(self.directory),
                local_files_only=True,
                trust_remote_code=self.trust_remote_code,
            )
        except (OSError, ValueError, KeyError) as error:
            raise RequestError(
                400,
                f"this engine has no tokenizer, so it takes token ids only "
                f"(/inference/v1/generate): {error}",
            ) from None


def _plain(message: Message) -> dict[str, Any]:
    """The message as the template wants it: content as one text."""
    plain: dict[str, Any] = msgspec.to_builtins(message)
    if isinstance(message.content, list):
        kinds = {part.type for part in message.content}
        if kinds - {"text"}:
            raise RequestError(400, f"content parts of type {sorted(kinds)} found, expected text")
        plain["content"] = "".join(part.text or "" for part in message.content)
    elif message.content is None:
        plain["content"] = ""
    return plain


def _render(
    tokenizer: Any, messages: list[dict[str, Any]], generation_prompt: bool, arguments: Any
) -> list[int]:
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt, **arguments
        )
    except (TemplateError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise RequestError(400, f"the chat template refused the messages: {error}") from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


class TextStream:
    """Decodes a growing completion; gives each character once it is complete."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._shown = 0
        self._context = 0

    def push(self, completion: list[int], is_last: bool = False) -> str:
        """The text that the tokens since the last call add. Decodes a few tokens before them as
        well, since some tokenizers write a token differently after another."""
        known = self._decode(completion[self._context : self._shown])
        text = self._decode(completion[self._context :])
        if text.endswith(REPLACEMENT) and not is_last:
            return ""
        self._context, self._shown = self._shown, len(completion)
        return str(text[len(known) :])


class StopStrings:
    """Finds stop strings at the end of a completion."""

    def __init__(self, tokenizer: Any, strings: list[str], skip_special_tokens: bool) -> None:
        self.strings = [string for string in strings if string]
        self._decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        self._window = max(len(string.encode()) for string in self.strings) + 8

    def __call__(self, completion: list[int]) -> bool:
        """True when the last tokens' text holds a stop string."""
        tail = self._decode(completion[-self._window :])
        return any(string in tail for string in self.strings)

    def cut(self, text: str) -> str:
        """The text before the first stop string."""
        places = [place for string in self.strings if (place := text.find(string)) >= 0]
        return text[: min(places)] if places else text

    def without_beginning(self, text: str) -> str:
        """The text without an end that may grow into a stop string."""
        held = 0
        for string in self.strings:
            for length in range(min(len(string) - 1, len(text)), held, -1):
                if text.endswith(string[:length]):
                    held = length
                    break
        return text[: len(text) - held]
