"""The game: players take one to three stones in turn; who takes the last one wins."""

from __future__ import annotations

import random

MOST_TAKEN = 3
"""Stones a move may take."""


def read_move(reply: str, stones: int) -> int | None:
    """The stones a reply takes, written as one digit; None when the rules forbid it."""
    if len(reply) != 1 or reply not in "123" or int(reply) > stones:
        return None
    return int(reply)


def best_move(stones: int) -> int | None:
    """The move that wins against every defence; None when there is none.

    A player who faces a multiple of four loses to perfect play: whatever they take, the other takes
    the rest of the four.
    """
    return stones % (MOST_TAKEN + 1) or None


def random_move(stones: int, game: str) -> int:
    """A legal move, all equally likely, the same whenever `game` (what was played so far) is."""
    return random.Random(f"duel/{game}").randint(1, min(MOST_TAKEN, stones))


def perfect_move(stones: int) -> int:
    """The winning move, or one stone where none wins."""
    return best_move(stones) or 1
