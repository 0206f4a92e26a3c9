"""How likely the model finds a prompt's own tokens: one packed forward, the head in chunks.

As vLLM defines them, prompt log-probabilities are those of the model's own distribution: float32,
over the whole vocabulary, at temperature 1, whatever the sampling parameters say.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from prime_rl.api.batch import PackedBatch
from prime_rl.inference.runner import ModelRunner
from prime_rl.inference.sequence import Sequence, TokenScore

CHUNK_ELEMENTS = 2**24
"""Most logits at once: 64 MiB."""


def score_prompts(runner: ModelRunner, sequences: list[Sequence]) -> Tensor:
    """Fill in `prompt_scores` of every sequence; final hidden states [B, H] of their last tokens.

    A sequence with a score that is no finite number gets its `error` set instead.
    """
    documents = [sequence.tokens[: sequence.prompt_length] for sequence in sequences]
    batch = PackedBatch.from_documents(documents, device=str(runner.device))
    hidden_TH = runner.plugin.forward(runner.module, batch)
    most = max(sequence.prompt_tops or 0 for sequence in sequences)
    # Token t + 1 is predicted by the state at t; what a document's last state predicts is dropped.
    targets_T = batch.input_ids.roll(-1)
    scores = _scores(runner, hidden_TH, targets_T, most)
    start = 0
    for sequence, document in zip(sequences, documents, strict=True):
        found = scores[start : start + len(document) - 1]
        start += len(document)
        if not all(math.isfinite(candidates[0].logprob) for candidates in found):
            sequence.error = (
                "the model gave log-probabilities that are not finite for the prompt; its weights "
                "or its code are damaged"
            )
        wanted = (sequence.prompt_tops or 0) + 1
        sequence.prompt_scores = [[], *(candidates[:wanted] for candidates in found)]
    return hidden_TH[batch.cu_seqlens[1:].long() - 1]


def _scores(
    runner: ModelRunner, hidden_TH: Tensor, targets_T: Tensor, tops: int
) -> list[list[TokenScore]]:
    """Per position the target's score, then the `tops` likeliest tokens'."""
    found: list[list[TokenScore]] = []
    rows = max(1, CHUNK_ELEMENTS // runner.vocab_size)
    for hidden, targets in zip(hidden_TH.split(rows), targets_T.split(rows), strict=True):
        logprobs = torch.log_softmax(runner.logits(hidden), dim=-1)
        own = logprobs.gather(1, targets[:, None].long())
        ranks = (logprobs >= own).sum(dim=-1).tolist()
        triples = zip(targets.tolist(), own[:, 0].tolist(), ranks, strict=True)
        chunk = [[TokenScore(*triple)] for triple in triples]
        if tops:
            values, ids = logprobs.topk(min(tops, logprobs.shape[1]))
            for candidates, row, tokens in zip(chunk, values.tolist(), ids.tolist(), strict=True):
                pairs = zip(tokens, row, strict=True)
                candidates += [TokenScore(t, v, place) for place, (t, v) in enumerate(pairs, 1)]
        found += chunk
    return found
