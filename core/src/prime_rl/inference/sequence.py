"""One running completion: its tokens, how it is sampled, and what has been recorded about it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import numpy

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are drawn. Defaults: the model's own distribution."""

    max_tokens: int
    """Most tokens to generate."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """Most candidates; 0: all."""
    min_p: float = 0.0
    """Least probability of a candidate, as a part of the likeliest one's."""
    min_tokens: int = 0
    """No stop token before this many."""
    stop_token_ids: frozenset[int] = frozenset()
    """The token that ends a completion belongs to it."""
    seed: int = 0
    top_logprobs: int = 0
    """Likeliest candidates to report at every position."""

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is taken."""
        return self.temperature == 0.0

    @property
    def is_filtered(self) -> bool:
        """True when some tokens are left out before drawing."""
        return not self.is_greedy and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


@dataclass(frozen=True, slots=True)
class TokenScore:
    """How likely a token is at a position."""

    token: int
    logprob: float
    """Nats, at temperature 1."""
    rank: int
    """Number of tokens that are at least as likely."""


@dataclass(eq=False, slots=True)
class Sequence:
    """Prompt and completion, in the engine thread's hands until `finish_reason` is set."""

    request_id: str
    tokens: list[int]
    """Prompt, then what was sampled; only ever appended to."""
    prompt_length: int
    params: SamplingParams
    notify: Callable[[Sequence, int], None] | None = None
    """Called in the server's thread as (sequence, tokens it now has) after every step; None: only
    `finished` is called."""
    finished: Callable[[Sequence], None] | None = None
    """Called in the server's thread once."""
    is_stopped_by_text: Callable[[list[int]], bool] | None = None
    """Asked with the completion after every token whether its text holds a stop string."""
    wants_kept: bool = False
    """Record which tokens were candidates at every position."""
    wants_routes: bool = False
    """Record the experts of every token."""
    prompt_tops: int | None = None
    """Score the prompt's tokens, and this many of the likeliest at every position; None: neither."""
    prompt_scores: list[list[TokenScore]] | None = None
    """Per prompt token its own score, then the likeliest ones'; none for the first token."""
    draws: random.Random = field(init=False)
    """One draw per sampled token, whatever else runs beside this sequence."""
    logprobs: list[float] = field(default_factory=list)
    """Of each sampled token, nats."""
    top_logprobs: list[list[tuple[int, float]]] = field(default_factory=list)
    """Likeliest candidates per sampled token, when asked for."""
    kept: list[list[int]] = field(default_factory=list)
    """Candidates per sampled token; an empty list stands for the whole vocabulary."""
    routes: list[numpy.ndarray] = field(default_factory=list)
    """Experts of the tokens so far, pieces of [tokens, layers, top_k]."""
    routed_tokens: int = 0
    """Tokens that `routes` covers."""
    slot: int = -1
    cached: int = 0
    """Tokens the decoder has seen since it last forgot."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The token that ended it, when one did."""
    error: str = ""

    def __post_init__(self) -> None:
        self.draws = random.Random(self.params.seed)

    @property
    def awaits_scores(self) -> bool:
        """The prompt is still to be scored."""
        return self.prompt_tops is not None and self.prompt_scores is None

    @property
    def completion(self) -> list[int]:
        """Sampled tokens."""
        return self.tokens[self.prompt_length :]
