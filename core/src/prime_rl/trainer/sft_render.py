"""Conversations to tokens and a mask of what a model would have sampled, once per row."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from prime_rl.errors import ConfigError
from prime_rl.trainer.sft_rows import Conversation
from prime_rl.trainer.streams import Array

log = logging.getLogger(__name__)


class Renderer(Protocol):
    """What is used of a `renderers` renderer."""

    def render(self, messages: Any, *, tools: Any = None) -> Any:
        """Tokens with attribution."""

    def get_stop_token_ids(self) -> list[int]:
        """Tokens that end a reply."""


@dataclass(frozen=True)
class Sample:
    """One rendered row, cut to the sequence length and behind its last trained token."""

    token_ids: Array
    """int32 [T]"""
    mask: Array
    """bool [T], True for tokens that a model samples: contents and ends of assistant turns."""

    @property
    def trains(self) -> bool:
        """Whether any token can be trained; the first has nothing that predicts it."""
        return bool(self.mask[1:].any())


class SampleCache:
    """Renders rows when they are first asked for and keeps the result."""

    def __init__(self, rows: list[Conversation], renderer: Renderer, seq_len: int) -> None:
        self._rows = rows
        self._renderer = renderer
        self._stop_ids = set(renderer.get_stop_token_ids())
        self._seq_len = seq_len
        self._samples: list[Sample | None] = [None] * len(rows)
        self._told = False

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Sample:
        sample = self._samples[index]
        if sample is None:
            sample = self._render(index)
            self._samples[index] = sample
        return sample

    def _render(self, index: int) -> Sample:
        from renderers import build_training_sample

        row = self._rows[index]
        try:
            rendered = build_training_sample(
                self._renderer,
                row.messages,
                tools=row.tools,
                ensure_final_stop=True,
            )
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"data row {index + 1} cannot be rendered: {error}") from error
        mask = np.asarray(rendered.loss_mask, dtype=bool)
        token_ids = np.asarray(rendered.token_ids, dtype=np.int32)
        if mask.any() and not self._stop_ids & set(token_ids[mask].tolist()):
            raise ConfigError(
                f"data row {index + 1}: no end token is trained (expected one of "
                f"{sorted(self._stop_ids)}); the renderer does not fit the tokenizer"
            )
        sample = _useful_part(token_ids[: self._seq_len], mask[: self._seq_len])
        if not sample.trains and not self._told:
            self._told = True
            log.warning(
                "data row %d is passed over, and so is every other row like it: none of its %d "
                "tokens within seq_len %d is an assistant's; its roles are %s",
                index + 1,
                len(token_ids),
                self._seq_len,
                [message.get("role") for message in row.messages],
            )
        return sample


def _useful_part(token_ids: Array, mask: Array) -> Sample:
    """Without the tokens behind the last that trains: nothing is learned from them."""
    trained = np.flatnonzero(mask)
    stop = int(trained[-1]) + 1 if len(trained) else len(mask)
    return Sample(token_ids[:stop], mask[:stop])


def check_renderer(renderer: Renderer) -> None:
    """Raise ConfigError when the renderer does not say which tokens a model samples."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rendered = renderer.render(messages)
    if len(rendered.sampled_mask) != len(rendered.token_ids):
        raise ConfigError(
            f"tokenizer.renderer: {type(renderer).__name__} does not tell sampled tokens from "
            "template text, which fine-tuning needs; choose the model's own renderer or 'chatml'"
        )
