"""The question that is asked, and the same words as chat examples for supervised fine-tuning."""

from __future__ import annotations

import random
from typing import Any

from prime_rl_environment_reverse_text.words import Split, random_words

WORD = "{word}"
PROMPT = f"reverse {WORD}"
"""The user message; `{word}` stands for the word."""


def check_prompt(prompt: str) -> str:
    """The prompt itself; ValueError when the word is asked for nowhere in it."""
    if WORD not in prompt:
        raise ValueError(f"prompt {prompt!r} does not contain {WORD}, the place of the word")
    return prompt


def question(prompt: str, word: str) -> str:
    """The user message that asks for one word."""
    return prompt.replace(WORD, word)


def sft_rows(
    count: int,
    *,
    seed: int = 0,
    split: Split = "train",
    min_length: int = 4,
    max_length: int = 10,
    prompt: str = PROMPT,
    hint_share: float = 0.0,
) -> list[dict[str, Any]]:
    """`count` rows of one split: `{"messages": [user, assistant]}` with the correct answer.

    Same distribution of words as the task set with the same arguments; rows of the training split
    never contain a held-out word. A share `hint_share` of them, drawn at random, begins with a
    system message that gives the answer away, and asks for another word: only the hint tells. It is
    what a model must have seen to make use of hints.
    """
    check_prompt(prompt)
    if not 0 <= hint_share <= 1:
        raise ValueError(f"hint_share is {hint_share}, expected a share between 0 and 1")
    words = list(
        random_words(count, seed=seed, split=split, min_length=min_length, max_length=max_length)
    )
    draw = random.Random(seed)
    return [
        _hinted_row(prompt, word, draw.choice(words))
        if draw.random() < hint_share
        else _row(prompt, word, word[::-1])
        for word in words
    ]


def _row(prompt: str, word: str, answer: str) -> dict[str, Any]:
    asked = {"role": "user", "content": question(prompt, word)}
    return {"messages": [asked, {"role": "assistant", "content": answer}]}


def _hinted_row(prompt: str, word: str, asked: str) -> dict[str, Any]:
    answer = word[::-1]
    row = _row(prompt, asked, answer)
    return {"messages": [{"role": "system", "content": answer}, *row["messages"]]}
