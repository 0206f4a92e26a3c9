"""Legal moves, all equally likely, as chat examples for supervised fine-tuning."""

from __future__ import annotations

import random
from typing import Any

from prime_rl_environment_duel.rules import MOST_TAKEN


def sft_rows(
    count: int, *, seed: int = 0, min_stones: int = 1, max_stones: int = 15
) -> list[dict[str, Any]]:
    """`count` rows: `{"messages": [user, assistant, user, ...]}`, one player's side of a game.

    They teach the rules and how a game goes on, not how to win: both players move at random. Raises
    ValueError when the piles are out of order.
    """
    if not 1 <= min_stones <= max_stones:
        raise ValueError(
            f"piles must satisfy 1 <= min_stones <= max_stones; "
            f"got min_stones={min_stones}, max_stones={max_stones}"
        )
    source = random.Random(f"duel/{seed}")
    return [{"messages": _game(source, min_stones, max_stones)} for _ in range(count)]


def _game(source: random.Random, min_stones: int, max_stones: int) -> list[dict[str, str]]:
    stones, messages = source.randint(min_stones, max_stones), []
    while stones > 0:
        move = source.randint(1, min(MOST_TAKEN, stones))
        messages.append({"role": "user", "content": str(stones)})
        messages.append({"role": "assistant", "content": str(move)})
        stones -= move
        if stones:
            stones -= source.randint(1, min(MOST_TAKEN, stones))
    return messages
