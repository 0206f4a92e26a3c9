"""Turns of one agent -> training sequences, merged where a prompt continues an earlier sequence.

A turn continues a sequence when the sequence's token ids are an exact prefix of the turn's prompt;
of several, the longest wins. Text is never compared: two token lists that decode alike are
different. Where nothing continues (a template dropped earlier thinking, a history was rewritten) a
new sequence starts, and what was sampled earlier is only context in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Turn:
    """One model call: what it was given and what it sampled."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    completion_mask: Sequence[bool] | None = None
    """False where a token was appended by somebody else; None: the model sampled all of them."""
    logprobs: Sequence[float] | None = None
    """Sampler's log-probability per completion token (0.0 where not sampled); None: zeros."""


@dataclass
class MergedSequence:
    """One merged sequence; every list has one entry per token."""

    token_ids: list[int]
    mask: list[bool]
    """True where this sequence trains the token."""
    logprobs: list[float]
    """0.0 where mask is False."""
    turns: list[int] = field(default_factory=list)
    """Numbers of the turns it holds, in order."""

    def continues_in(self, prompt_ids: Sequence[int]) -> bool:
        """Whether a turn with this prompt extends the sequence."""
        length = len(self.token_ids)
        return length <= len(prompt_ids) and list(prompt_ids[:length]) == self.token_ids

    def append(self, number: int, turn: Turn) -> None:
        """Add what the turn's prompt has beyond the sequence (not trained) and its completion."""
        observed = turn.prompt_ids[len(self.token_ids) :]
        completion = len(turn.completion_ids)
        mask = [True] * completion if turn.completion_mask is None else list(turn.completion_mask)
        logprobs = [0.0] * completion if turn.logprobs is None else list(turn.logprobs)
        if len(mask) != completion or len(logprobs) != completion:
            raise ValueError(
                f"turn {number}: {completion} completion tokens, {len(mask)} mask entries, "
                f"{len(logprobs)} log-probabilities"
            )
        self.token_ids += [*observed, *turn.completion_ids]
        self.mask += [False] * len(observed) + mask
        self.logprobs += [0.0] * len(observed)
        if not all(mask):
            logprobs = [
                value if sampled else 0.0 for value, sampled in zip(logprobs, mask, strict=True)
            ]
        self.logprobs += logprobs
        self.turns.append(number)


def merge_turns(turns: Sequence[Turn]) -> list[MergedSequence]:
    """Merge turns in the order they happened. The number of forks is `len(result) - 1`."""
    sequences: list[MergedSequence] = []
    for number, turn in enumerate(turns):
        target: MergedSequence | None = None
        for sequence in sequences:
            longer = target is None or len(sequence.token_ids) > len(target.token_ids)
            if longer and sequence.continues_in(turn.prompt_ids):
                target = sequence
        if target is None:
            target = MergedSequence([], [], [])
            sequences.append(target)
        target.append(number, turn)
    return sequences
