"""Random lower-case words, and beginnings for words to be invented."""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Iterator
from typing import Literal

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 8
"""One word in this many is held out."""
BEGINNING_LETTERS = 2
"""Letters that an invented word must begin with."""
MOST_TRIES_PER_WORD = 1000
"""Give up when so many draws in a row were words that are there already or of the other split."""


def split_of(word: str) -> Split:
    """Which split a word belongs to: a property of the word alone, whatever the seed or run."""
    return "held_out" if zlib.crc32(word.encode()) % HELD_OUT_SHARE == 0 else "train"


def random_words(
    count: int, *, seed: int, split: Split, min_length: int, max_length: int
) -> Iterator[str]:
    """Yield `count` distinct words of one split; lengths are uniform, then letters are uniform.

    The same arguments give the same words in the same order; a larger `count` continues the list.
    Raises ValueError when the lengths are out of order or there are not enough words.
    """
    if not BEGINNING_LETTERS <= min_length <= max_length:
        raise ValueError(
            f"word lengths must satisfy {BEGINNING_LETTERS} <= min_length <= max_length; "
            f"got min_length={min_length}, max_length={max_length}"
        )
    source = random.Random(f"proposer/{seed}")
    seen: set[str] = set()
    for _ in range(count):
        for _ in range(MOST_TRIES_PER_WORD):
            length = source.randint(min_length, max_length)
            word = "".join(source.choices(string.ascii_lowercase, k=length))
            if word not in seen and split_of(word) == split:
                break
        else:
            raise ValueError(
                f"{count} distinct words were asked for and no more than {len(seen)} were found "
                f"with max_length={max_length}; raise it or ask for fewer"
            )
        seen.add(word)
        yield word


def is_proposal(word: str, beginning: str, max_length: int) -> bool:
    """Lower-case letters that begin as asked, at least one more, at most `max_length`."""
    letters = set(string.ascii_lowercase)
    return (
        word.startswith(beginning)
        and len(beginning) < len(word) <= max_length
        and letters.issuperset(word)
    )
