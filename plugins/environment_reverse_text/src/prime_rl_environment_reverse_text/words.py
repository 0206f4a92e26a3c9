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
    Short lengths run out first when many words are asked for. Raises ValueError when the lengths
    are out of order or hold fewer than twice that many words of the split.
    """
    if not 1 <= min_length <= max_length:
        raise ValueError(
            f"word lengths must satisfy 1 <= min_length <= max_length; "
            f"got min_length={min_length}, max_length={max_length}"
        )
    shares = {"held_out": 1, "train": HELD_OUT_SHARE - 1}
    letters = len(string.ascii_lowercase)
    existing = sum(letters**length for length in range(min_length, max_length + 1))
    most = existing * shares[split] // (2 * HELD_OUT_SHARE)
    if count > most:
        raise ValueError(
            f"{count} distinct words of {min_length} to {max_length} letters were asked for; "
            f"at most {most} are drawn from split {split!r}; raise max_length or ask for fewer"
        )
    source = random.Random(f"reverse-text/{seed}")
    seen: set[str] = set()
    while len(seen) < count:
        length = source.randint(min_length, max_length)
        word = "".join(source.choices(string.ascii_lowercase, k=length))
        if split_of(word) == split and word not in seen:
            seen.add(word)
            yield word
