"""Draws one token per sequence from float32 logits and reports the log-probability it was drawn with.

Log-probabilities are taken at the sampling temperature and renormalised over the candidates that
top-k, top-p and min-p leave, so a trainer that scores the same candidates at the same temperature
gets the same number. Greedy sequences report the plain softmax over the whole vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy
import torch
from torch import Tensor

from prime_rl.inference.sequence import Sequence

BELOW_ONE = 1.0 - 2.0**-52
"""Keeps draw * total below total after rounding, so that no token of probability 0 is drawn."""


@dataclass
class Sampled:
    """One entry per sequence."""

    tokens: list[int]
    logprobs: list[float]
    kept: dict[int, list[int]] = field(default_factory=dict)
    """Row -> candidates in order of falling probability; missing: the whole vocabulary."""
    tops: dict[int, list[tuple[int, float]]] = field(default_factory=dict)
    """Row -> likeliest candidates, for sequences that asked."""


class Sampler:
    """Keeps the tensors of the current set of sequences; a step of the same set reuses them."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._sequences: list[Sequence] = []

    def sample(self, logits: Tensor, sequences: list[Sequence]) -> Sampled:
        """Draw one token for each row of logits, float32 [B, V], B = len(sequences)."""
        if sequences != self._sequences:
            self._prepare(sequences)
        banned = self._ban_stop_tokens(logits, sequences) if self._has_min_tokens else []
        if self._temperatures is not None:
            logits = logits / self._temperatures
        rows = sorted({*self._filtered_rows, *banned}) if banned else self._filtered_rows
        draws = [sequence.draws.random() * BELOW_ONE for sequence in sequences]
        draw = _draw_on_host if self.device.type == "cpu" else _draw_on_device
        sampled = Sampled(*draw(logits, draws, self._greedy_rows))
        if rows:
            self._sample_filtered(logits, draws, sequences, rows, sampled)
        for row in self._top_rows:
            if row not in sampled.tops:
                count = sequences[row].params.top_logprobs
                sampled.tops[row] = _likeliest(logits[row].log_softmax(dim=0), count)
        return sampled

    def _prepare(self, sequences: list[Sequence]) -> None:
        params = [sequence.params for sequence in sequences]
        self._sequences = list(sequences)
        self._has_min_tokens = any(p.min_tokens for p in params)
        self._filtered_rows = [row for row, p in enumerate(params) if p.is_filtered]
        self._top_rows = [row for row, p in enumerate(params) if p.top_logprobs]
        temperatures = [1.0 if p.is_greedy else p.temperature for p in params]
        self._temperatures = (
            None
            if all(value == 1.0 for value in temperatures)
            else torch.tensor(temperatures, dtype=torch.float32, device=self.device)[:, None]
        )
        self._greedy_rows = [row for row, p in enumerate(params) if p.is_greedy]

    def _ban_stop_tokens(self, logits: Tensor, sequences: list[Sequence]) -> list[int]:
        """Rule out stop tokens in sequences below their least length; returns their rows."""
        rows = []
        for row, sequence in enumerate(sequences):
            params = sequence.params
            if len(sequence.logprobs) < params.min_tokens and params.stop_token_ids:
                logits[row, sorted(params.stop_token_ids)] = -torch.inf
                rows.append(row)
        return rows

    def _sample_filtered(
        self,
        logits: Tensor,
        draws: list[float],
        sequences: list[Sequence],
        rows: list[int],
        sampled: Sampled,
    ) -> None:
        """Draw the given rows anew from their candidates only."""
        params = [sequences[row].params for row in rows]
        ordered, ids = logits[rows].sort(dim=-1, descending=True, stable=True)
        vocabulary = ordered.shape[1]
        if any(p.min_p > 0 for p in params):
            floors = torch.tensor([p.min_p for p in params], device=self.device)[:, None]
            relative = (ordered - ordered[:, :1]).exp()
            ordered = ordered.masked_fill(relative < floors, -torch.inf)
        limits = torch.tensor([p.top_k or vocabulary for p in params], device=self.device)[:, None]
        rank = torch.arange(vocabulary, device=self.device)
        ordered = ordered.masked_fill(rank >= limits, -torch.inf)
        if any(p.top_p < 1 for p in params):
            bounds = torch.tensor([p.top_p for p in params], device=self.device)[:, None]
            masses = torch.softmax(ordered, dim=-1, dtype=torch.float64)
            before = masses.cumsum(dim=-1) - masses
            ordered = ordered.masked_fill((before >= bounds) & (rank > 0), -torch.inf)
        logprobs = torch.log_softmax(ordered, dim=-1)
        chances = [0.0 if p.is_greedy else draws[row] for row, p in zip(rows, params, strict=True)]
        places = _inverse_cumulative(logprobs, chances)
        counts = (ordered > -torch.inf).sum(dim=-1).tolist()
        tokens = ids.gather(1, places[:, None])[:, 0].tolist()
        chosen = logprobs.gather(1, places[:, None])[:, 0].tolist()
        for index, row in enumerate(rows):
            sequence = sequences[row]
            sampled.tokens[row], sampled.logprobs[row] = tokens[index], chosen[index]
            if sequence.wants_kept and counts[index] < vocabulary:
                sampled.kept[row] = ids[index, : counts[index]].tolist()
            if sequence.params.top_logprobs:
                count = min(sequence.params.top_logprobs, counts[index])
                best = logprobs[index, :count].tolist()
                sampled.tops[row] = list(zip(ids[index, :count].tolist(), best, strict=True))


def _draw_on_host(
    logits: Tensor, draws: list[float], greedy_rows: list[int]
) -> tuple[list[int], list[float]]:
    """Tokens and their log-probabilities with as few array operations as there can be: between two
    steps of a small model each costs more than its arithmetic. Float64 holds the exponentials of
    any logits below 709, so nothing is subtracted first."""
    values = logits.numpy()
    cumulative = values.astype(numpy.float64)
    numpy.exp(cumulative, out=cumulative)
    numpy.add.accumulate(cumulative, 1, out=cumulative)
    totals = cumulative[:, -1].tolist()
    if not all(0.0 < total < math.inf for total in totals):
        return _draw_on_device(logits, draws, greedy_rows)
    last = values.shape[1] - 1
    tokens = [
        min(int(row.searchsorted(draw * total, side="right")), last)
        for row, draw, total in zip(cumulative, draws, totals, strict=True)
    ]
    for row in greedy_rows:
        tokens[row] = int(values[row].argmax())
    return tokens, [
        values.item(row, token) - math.log(total)
        for row, (token, total) in enumerate(zip(tokens, totals, strict=True))
    ]


def _draw_on_device(
    logits: Tensor, draws: list[float], greedy_rows: list[int]
) -> tuple[list[int], list[float]]:
    """The same with torch, where the logits are."""
    logprobs = torch.log_softmax(logits, dim=-1)
    tokens = _inverse_cumulative(logprobs, draws)
    if greedy_rows:
        tokens[greedy_rows] = logprobs[greedy_rows].argmax(dim=-1)
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return tokens.tolist(), chosen.tolist()


def _inverse_cumulative(logprobs: Tensor, draws: list[float]) -> Tensor:
    """int64 [B]: where the cumulative distribution of each row passes its draw. Float64 sums, so
    that the small steps of a large vocabulary survive."""
    cumulative = logprobs.double().exp().cumsum(dim=-1)
    chances = torch.tensor(draws, dtype=torch.float64, device=logprobs.device)
    targets = (chances * cumulative[:, -1])[:, None]
    places = torch.searchsorted(cumulative, targets, right=True)[:, 0]
    return places.clamp(max=logprobs.shape[1] - 1)


def _likeliest(logprobs: Tensor, count: int) -> list[tuple[int, float]]:
    """The `count` likeliest tokens of one row."""
    values, ids = logprobs.topk(min(count, logprobs.shape[0]))
    return list(zip(ids.tolist(), values.tolist(), strict=True))
