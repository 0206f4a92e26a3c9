"""The question that is asked, and the same words as chat examples for supervised fine-tuning."""

from __future__ import annotations

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
) -> list[dict[str, Any]]:
    """`count` rows of one split: `{"messages": [user, assistant]}` with the correct answer.

    Same distribution of words as the task set with the same arguments; rows of the training split
    never contain a held-out word.
    """
    check_prompt(prompt)
    words = random_words(
        count, seed=seed, split=split, min_length=min_length, max_length=max_length
    )
    return [
        {
            "messages": [
                {"role": "user", "content": question(prompt, word)},
                {"role": "assistant", "content": word[::-1]},
            ]
        }
        for word in words
    ]
