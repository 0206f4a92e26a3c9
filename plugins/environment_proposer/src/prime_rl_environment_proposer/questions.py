"""How a word is asked for, and how its solution is."""

from __future__ import annotations


def proposer_question(beginning: str) -> str:
    """Asks for a word that begins so."""
    return f"invent {beginning}"


def solver_question(word: str) -> str:
    """Asks for the word turned round."""
    return f"reverse {word}"
