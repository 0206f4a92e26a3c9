"""A plain ChatML renderer: role headers, text, end of turn; nothing else is ever written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from renderers.base import (
    Message,
    ParsedResponse,
    RenderedTokens,
    Tokenizer,
    ToolSpec,
    extract_message_tool_names,
    reject_assistant_in_extension,
    trim_to_turn_close,
)
from renderers.configs import BaseRendererConfig

TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"


class ChatMLRendererConfig(BaseRendererConfig):
    """The renderer has no settings."""

    name: Literal["chatml"] = "chatml"


@dataclass
class _Stream:
    """Tokens and their attribution, always of one length."""

    token_ids: list[int] = field(default_factory=list)
    message_indices: list[int] = field(default_factory=list)
    sampled_mask: list[bool] = field(default_factory=list)
    is_content: list[bool] = field(default_factory=list)

    def add(
        self, token_ids: Sequence[int], index: int, *, sampled: bool = False, content: bool = False
    ) -> None:
        """Append tokens of message `index`; -1 stands for none."""
        self.token_ids.extend(token_ids)
        self.message_indices.extend([index] * len(token_ids))
        self.sampled_mask.extend([sampled] * len(token_ids))
        self.is_content.extend([content] * len(token_ids))


class ChatMLRenderer:
    """Turns messages into tokens and replies back into text.

    A message is `<|im_start|>role\\ncontent<|im_end|>\\n`; the prompt for a reply ends in
    `<|im_start|>assistant\\n`. Header, content and end are encoded apart, so a conversation's
    tokens are a prefix of every continuation, and the tokens of a reply are the same whether it
    was sampled or rendered. Sampled are the content of an assistant message and its `<|im_end|>`.
    Reasoning markup is ordinary text here, and there are no tools.
    """

    config_class: ClassVar[type[BaseRendererConfig]] = ChatMLRendererConfig
    supports_tools: ClassVar[bool] = False
    is_prefix_stable: ClassVar[bool] = True

    def __init__(self, tokenizer: Tokenizer, config: ChatMLRendererConfig | None = None) -> None:
        self.config = config or ChatMLRendererConfig()
        self._tokenizer = tokenizer
        self._turn_start = self._token_id(TURN_START)
        self._turn_end = self._token_id(TURN_END)
        self._newline = self._encode("\n")
        self._headers: dict[str, list[int]] = {}

    def render(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> RenderedTokens:
        """Tokens of a whole conversation, each with its message, body and sampled flags."""
        if not messages:
            raise ValueError("there are no messages to render")
        stream = _Stream()
        self._add_messages(stream, messages, tools)
        if add_generation_prompt:
            stream.add(self._header("assistant"), -1)
        return _rendered(stream, messages)

    def render_ids(
        self,
        messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Tokens of a whole conversation."""
        rendered = self.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return rendered.token_ids

    def parse_response(
        self,
        token_ids: list[int],
        *,
        tools: list[ToolSpec] | None = None,
        prompt_ids: list[int] | None = None,
    ) -> ParsedResponse:
        """Text of a sampled reply, up to its end token when it has one."""
        if self._turn_end in token_ids:
            token_ids = token_ids[: token_ids.index(self._turn_end)]
        return ParsedResponse(
            content=self._tokenizer.decode(token_ids, skip_special_tokens=False),
            reasoning_complete=None,
        )

    def get_stop_token_ids(self) -> list[int]:
        """A reply ends with its turn."""
        return [self._turn_end]

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Message],
        *,
        tools: list[ToolSpec] | None = None,
    ) -> RenderedTokens | None:
        """The next prompt: all previous tokens as they were, then the new messages.

        A reply that was cut off gets its end token. None when a new message is an assistant's.
        """
        if not previous_prompt_ids or not new_messages:
            return None
        if reject_assistant_in_extension(new_messages):
            return None
        previous = trim_to_turn_close(
            previous_prompt_ids,
            previous_completion_ids,
            {self._turn_end},
            synthesize_close=self._turn_end,
        )
        if previous is None:
            return None
        stream = _Stream()
        stream.add([*previous, *self._newline], -1)
        self._add_messages(stream, new_messages, tools)
        stream.add(self._header("assistant"), -1)
        return _rendered(stream, new_messages)

    def _add_messages(
        self, stream: _Stream, messages: list[Message], tools: list[ToolSpec] | None
    ) -> None:
        if tools:
            raise ValueError("the chatml renderer has no tools; choose the model's own renderer")
        for index, message in enumerate(messages):
            sampled = message["role"] == "assistant"
            stream.add(self._header(message["role"]), index)
            body = self._encode(_text(message.get("content")))
            stream.add(body, index, sampled=sampled, content=True)
            stream.add([self._turn_end], index, sampled=sampled, content=sampled)
            stream.add(self._newline, index)

    def _header(self, role: str) -> list[int]:
        if role not in self._headers:
            self._headers[role] = [self._turn_start, *self._encode(f"{role}\n")]
        return self._headers[role]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def _token_id(self, token: str) -> int:
        token_id = self._tokenizer.convert_tokens_to_ids(token)
        if token_id is None or token_id == getattr(self._tokenizer, "unk_token_id", None):
            raise ValueError(
                f"the tokenizer has no token {token!r}, which the chatml renderer needs; "
                "choose the renderer that belongs to this tokenizer"
            )
        return int(token_id)


def _text(content: Any) -> str:
    """The text of a message's content: a string, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    kinds = sorted({part.get("type") for part in content} - {"text"})
    if kinds:
        raise ValueError(f"the chatml renderer takes text only; found parts of type {kinds}")
    return "".join(part["text"] for part in content)


def _rendered(stream: _Stream, messages: list[Message]) -> RenderedTokens:
    return RenderedTokens(
        token_ids=stream.token_ids,
        message_indices=stream.message_indices,
        sampled_mask=stream.sampled_mask,
        is_content=stream.is_content,
        message_roles=[message["role"] for message in messages],
        message_tool_names=extract_message_tool_names(messages),
    )
