"""What an invented word and a solution are worth."""

from __future__ import annotations


def proposal_reward(solved: float) -> float:
    """1 - |2 p - 1| for a word that the share p of its solvers solved.

    A word that half of them solve is worth 1; one that all or none solve teaches nobody and is worth
    nothing.
    """
    return 1.0 - abs(2.0 * solved - 1.0)


def solution_reward(reply: str, word: str) -> float:
    """1 when the reply is the word turned round, 0 otherwise."""
    return float(reply == word[::-1])
