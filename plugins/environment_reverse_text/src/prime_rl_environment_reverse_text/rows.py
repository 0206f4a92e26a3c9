"""The same words as chat examples for supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from prime_rl_environment_reverse_text.words import Split, random_words

PROMPT = "reverse {word}"
"""The user message; `{word}` stands for the word."""


def sft_rows(
    count: int,
    *,
    seed: int = 0,
    split: Split = "train",
    min_length: int = 4,
    max_length: int = 10,
    prompt: str = PROMPT,
) -> list[dict[str, Any]]:
    """`count` rows of one split: `{"messages": [user, assistant]}` with the correct answer.

    Same distribution of words as the task set with the same arguments; rows of the training split
    never contain a held-out word.
    """
    words = random_words(
        count, seed=seed, split=split, min_length=min_length, max_length=max_length
    )
    return [
        {
            "messages": [
                {"role": "user", "content": prompt.format(word=word)},
                {"role": "assistant", "content": word[::-1]},
            ]
        }
        for word in words
    ]
