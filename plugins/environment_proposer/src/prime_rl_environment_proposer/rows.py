"""Invented and solved words as chat examples for supervised fine-tuning."""

from __future__ import annotations

from typing import Any

from prime_rl_environment_proposer.questions import proposer_question, solver_question
from prime_rl_environment_proposer.words import BEGINNING_LETTERS, Split, random_words


def sft_rows(
    count: int,
    *,
    seed: int = 0,
    split: Split = "train",
    min_length: int = 3,
    max_length: int = 8,
) -> list[dict[str, Any]]:
    """`count` rows of one split: `{"messages": [user, assistant]}`.

    In turn a word that is invented from its beginning, and another that is turned round.
    """
    words = random_words(
        count, seed=seed, split=split, min_length=min_length, max_length=max_length
    )
    return [
        _row(proposer_question(word[:BEGINNING_LETTERS]), word)
        if number % 2 == 0
        else _row(solver_question(word), word[::-1])
        for number, word in enumerate(words)
    ]


def _row(question: str, answer: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }
