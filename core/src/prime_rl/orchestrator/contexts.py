"""What an algorithm shows the reference before a branch, as tokens in the branch's own template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from prime_rl.api.algorithm import ReferenceContext
from prime_rl.errors import RunError
from prime_rl.orchestrator.columns import ReferenceView

MOST_REMEMBERED = 1024
"""Rendered contexts kept: those of a group, and of tasks that come again, are the same."""


class ContextRenderer:
    """Renders with the run's renderer; loaded when the first messages come."""

    def __init__(self, tokenizer: Path, renderer: str) -> None:
        self._tokenizer = tokenizer
        self._name = renderer
        self._renderer: Any = None
        self._known: dict[tuple[tuple[str, str], ...], tuple[tuple[int, ...], int]] = {}

    def view(self, context: ReferenceContext, token_ids: Sequence[int]) -> ReferenceView:
        """The context's tokens, before those of the branch.

        What a template writes at the very start of a conversation (a start token, a mask prefix)
        stands once: where the branch begins with the same tokens, the context's take their place.
        Raises RunError for messages that the renderer does not take.
        """
        if isinstance(context[0], int):
            return ReferenceView(tuple(cast("Sequence[int]", context)), 0)
        rendered, opening = self._rendered(cast("Sequence[Mapping[str, str]]", context))
        has_opening = tuple(token_ids[:opening]) == rendered[:opening]
        return ReferenceView(rendered, opening if has_opening else 0)

    def _rendered(self, messages: Sequence[Mapping[str, str]]) -> tuple[tuple[int, ...], int]:
        """Tokens, and how many of them belong to no message at the front."""
        key = tuple((message["role"], message["content"]) for message in messages)
        if key not in self._known:
            if len(self._known) >= MOST_REMEMBERED:
                self._known.clear()
            self._known[key] = self._render(messages)
        return self._known[key]

    def _render(self, messages: Sequence[Mapping[str, str]]) -> tuple[tuple[int, ...], int]:
        from prime_rl.models.renderers import load_renderer

        if self._renderer is None:
            self._renderer = load_renderer(self._tokenizer, self._name)
        try:
            found = self._renderer.render([dict(message) for message in messages])
        except Exception as error:  # templates raise anything for messages they do not like
            raise RunError(
                f"the renderer {self._name!r} does not take a conversation that begins with the "
                f"roles {[message['role'] for message in messages]}: {error}. Give the hint "
                "another role"
            ) from error
        indices = list(found.message_indices)
        is_attributed = any(index >= 0 for index in indices)
        opening = next((n for n, index in enumerate(indices) if index >= 0), 0)
        return tuple(found.token_ids), opening if is_attributed else 0
