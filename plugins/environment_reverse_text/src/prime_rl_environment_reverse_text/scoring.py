"""How close a reply is to the reversed word."""

from __future__ import annotations


def character_accuracy(reply: str, answer: str) -> float:
    """Share of positions that hold the right character, in [0, 1].

    accuracy = #{i : reply[i] = answer[i]} / max(len(reply), len(answer)); surplus and missing
    characters both count as wrong. Two empty strings agree fully.
    """
    longest = max(len(reply), len(answer))
    if longest == 0:
        return 1.0
    return sum(given == wanted for given, wanted in zip(reply, answer, strict=False)) / longest
