"""Rows to fine-tune on: read from a .jsonl file or asked of a function, brought into one form."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prime_rl.configs.run import SFTDataConfig
from prime_rl.errors import ConfigError, what_was_raised

ROW_SHAPE = "expected a table with `messages`, or with `prompt` and `completion`"


@dataclass(frozen=True)
class Conversation:
    """One row: messages in order, and the tools they may call."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def load_rows(config: SFTDataConfig) -> list[Conversation]:
    """All rows of the source. Raises ConfigError naming the row that cannot be used."""
    rows = _read_file(config) if config.source.endswith(".jsonl") else _call_function(config)
    conversations = [
        as_conversation(row, f"{config.source}, row {number}")
        for number, row in enumerate(rows, start=1)
    ]
    if not conversations:
        raise ConfigError(f"data.source {config.source!r} has no rows")
    return conversations


def _read_file(config: SFTDataConfig) -> Iterable[Any]:
    if config.arguments:
        raise ConfigError("data.arguments belong to a `module:function`; data.source is a file")
    path = Path(config.source)
    try:
        # Only a newline ends a row: texts may hold other line separators, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.source: cannot read {path}: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error
    return rows


def _call_function(config: SFTDataConfig) -> Iterable[Any]:
    module_name, separator, name = config.source.partition(":")
    if not separator:
        raise ConfigError(
            f"data.source {config.source!r}: expected a .jsonl file or `module:function`"
        )
    try:
        function = getattr(importlib.import_module(module_name), name)
    except Exception as error:  # the user's module may raise anything
        raise ConfigError(
            f"data.source {config.source!r} cannot be loaded: {what_was_raised(error)}"
        ) from error
    try:
        return list(function(**config.arguments))
    except Exception as error:  # and so may its function
        raise ConfigError(
            f"data.source {config.source!r} with data.arguments {config.arguments}: "
            f"{what_was_raised(error)}"
        ) from error


def as_conversation(row: Any, where: str) -> Conversation:
    """The row in its one form. `where` names it in the ConfigError for anything else."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{where}: found {type(row).__name__}, {ROW_SHAPE}")
    if "messages" in row:
        if isinstance(row["messages"], str):
            raise ConfigError(f"{where}: `messages` is a text, expected a list of messages")
        messages = _messages(row["messages"], "user", where)
    elif "prompt" in row and "completion" in row:
        messages = _messages(row["prompt"], "user", where)
        messages += _messages(row["completion"], "assistant", where)
    else:
        raise ConfigError(f"{where}: found the keys {sorted(row)}, {ROW_SHAPE}")
    tools = row.get("tools", row.get("tool_defs"))
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ConfigError(f"{where}: tools: not JSON: {error}") from error
    return Conversation(messages, tools or None)


def _messages(value: Any, role: str, where: str) -> list[dict[str, Any]]:
    """Messages as given, or one message of `role` from a text."""
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise ConfigError(f"{where}: expected a text or a list of messages, found {value!r:.100}")
    for message in value:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ConfigError(f"{where}: expected messages with a `role`, found {message!r:.100}")
        content = message.get("content")
        if not isinstance(content, (str, list, type(None))):
            raise ConfigError(
                f"{where}: expected `content` to be a text, a list of parts or null, "
                f"found {content!r:.100}"
            )
    return [_without_nulls(message) for message in value]


def _without_nulls(value: Any) -> Any:
    """Drop keys that are null because some other row has them; arguments of tool calls stay."""
    if isinstance(value, Mapping):
        return {
            key: item if key == "arguments" else _without_nulls(item)
            for key, item in value.items()
            if item is not None
        }
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
