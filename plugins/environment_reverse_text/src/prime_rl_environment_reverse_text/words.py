"""Random lower-case words, split for good into training words and held-out words."""

from __future__ import annotations

import random
import string
import zlib
from collections.abc import Iterator
from typing import Literal

Split = Literal["train", "held_out"]

HELD_OUT_SHARE = 8
"""One word in this many is held out."""


def split_of(word: str) -> Split:
    """Which split a word belongs to: a property of the word alone, whatever the seed or run."""
    return "held_out" if zlib.crc32(word.encode()) % HELD_OUT_SHARE == 0 else "train"


def random_words(
    count: int, *, seed: int, split: Split, min_length: int, max_length: int
) -> Iterator[str]:
    """Yield `count` distinct words of one split; lengths are uniform, then letters are uniform.

    The same arguments give the same words in the same order; a larger `count` continues the list.
    Raises ValueError when the lengths are out of order or too short to hold that many words.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(
            f"word lengths must satisfy 1 <= min_length <= max_length; "
            f"got min_length={min_length}, max_length={max_length}"
        )
    shortest = len(string.ascii_lowercase) ** min_length
    if count > shortest // (2 * HELD_OUT_SHARE):
        raise ValueError(
            f"{count} distinct words of at least {min_length} letters were asked for; at most "
            f"{shortest // (2 * HELD_OUT_SHARE)} are drawn; raise min_length or ask for fewer"
        )
    source = random.Random(f"reverse-text/{seed}")
    seen: set[str] = set()
    while len(seen) < count:
        length = source.randint(min_length, max_length)
        word = "".join(source.choices(string.ascii_lowercase, k=length))
        if split_of(word) == split and word not in seen:
            seen.add(word)
            yield word
