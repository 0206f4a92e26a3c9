"""Training samples and micro-batches: the records that travel from orchestrator to trainer."""

from __future__ import annotations

from typing import Literal

import msgspec

EpisodeOutcome = Literal["completed", "truncated", "error", "timeout", "cancelled"]


class RoutedExperts(msgspec.Struct, frozen=True, array_like=True):
    """Experts chosen by the engine. Row-major `data` of `shape` [tokens, layers, top_k].

    The value 255 (uint8) or 65535 (uint16) means "route normally".
    """

    data: bytes
    shape: tuple[int, int, int]
    dtype: Literal["uint8", "uint16"]


class SamplingMask(msgspec.Struct, frozen=True, array_like=True):
    """Kept candidates per position in compressed rows; a count of 0 means the full vocabulary."""

    ids: bytes
    """int32 token ids of all positions, one after the other."""
    counts: bytes
    """int32 number of ids per position."""


class TrainingSample(msgspec.Struct, kw_only=True):
    """One branch of one episode: prompt and completions as the engine saw them.

    Every list has one entry per token. `logprobs[t]` is the sampler's log-probability (nats, at the
    sampling temperature) of `token_ids[t]`, 0.0 where `mask[t]` is false. Position 0 never trains.
    """

    token_ids: list[int]
    mask: list[bool]
    """Sampled by the trained policy and trainable."""
    logprobs: list[float]
    temperatures: list[float]
    env_name: str
    advantages: list[float] | None = None
    rl_weights: list[float] | None = None
    """None: 1.0 on every mask position."""
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None
    ref_logprobs: list[float] | None = None
    routed_experts: RoutedExperts | None = None
    sampling_mask: SamplingMask | None = None
    trace_id: str = ""
    branch_index: int = -1

    def streams(self) -> dict[str, list[float] | list[bool] | list[int]]:
        """Every per-token list that is present, by field name."""
        names = (
            "token_ids",
            "mask",
            "logprobs",
            "temperatures",
            "advantages",
            "rl_weights",
            "ce_weights",
            "ref_kl_weights",
            "ref_logprobs",
        )
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def check_aligned(self) -> None:
        """Raise ValueError naming the first stream whose length differs from the tokens'."""
        expected = len(self.token_ids)
        for name, stream in self.streams().items():
            if len(stream) != expected:
                raise ValueError(f"{name} has {len(stream)} entries, token_ids has {expected}")
        if self.routed_experts is not None and self.routed_experts.shape[0] != expected:
            raise ValueError(
                f"routed_experts has {self.routed_experts.shape[0]} rows, token_ids has {expected}"
            )
        if self.sampling_mask is not None and len(self.sampling_mask.counts) != 4 * expected:
            raise ValueError(
                f"sampling_mask has {len(self.sampling_mask.counts) // 4} rows, "
                f"token_ids has {expected}"
            )


class MicroBatch(msgspec.Struct, kw_only=True):
    """One packed row of documents for one rank. Numeric streams are little-endian bytes of length S.

    Bytes instead of lists: decoding is a view, not a million Python objects. `lengths` sum to S;
    `document_envs[k]` indexes `env_names`. Padding is a last document without trainable tokens.
    """

    input_ids: bytes
    """int32 [S]"""
    loss_mask: bytes
    """uint8 [S]"""
    inference_logprobs: bytes
    """float32 [S]"""
    temperatures: bytes
    """float32 [S]"""
    lengths: list[int]
    """Tokens per document, padding included as its own document."""
    env_names: list[str]
    document_envs: list[int]
    """[K] index into env_names per document."""
    trace_ids: list[str]
    """[K] "" when unknown."""
    branch_indices: list[int]
    """[K] -1 when unknown."""
    padding_tokens: int = 0
    """Tokens of the last document that are padding (0: no padding document)."""
    advantages: bytes | None = None
    """float32 [S]"""
    rl_weights: bytes | None = None
    """float32 [S]"""
    ce_weights: bytes | None = None
    """float32 [S]"""
    ref_kl_weights: bytes | None = None
    """float32 [S]"""
    ref_logprobs: bytes | None = None
    """float32 [S]"""
    routed_experts: RoutedExperts | None = None
    sampling_mask: SamplingMask | None = None


class BatchHeader(msgspec.Struct, frozen=True):
    """What the trainer must know about a step's batch beside its rows."""

    step: int
    policy_version: int
    """Newest version published when the batch was packed."""
    final: bool = False
    """True for the last batch of the run."""


class RankBatch(msgspec.Struct):
    """All micro-batches of one step for one data rank."""

    header: BatchHeader
    micro_batches: list[MicroBatch]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(RankBatch)


def encode_micro_batches(batch: RankBatch) -> bytes:
    """Serialise the batch of one rank."""
    return _encoder.encode(batch)


def decode_micro_batches(data: bytes) -> RankBatch:
    """Read what `encode_micro_batches` wrote; raises msgspec.DecodeError on anything else."""
    return _decoder.decode(data)
