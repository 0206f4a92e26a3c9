"""What crosses a process border: msgspec records only. Imports nothing of ours but msgspec."""

from prime_rl.wire.records import (
    BatchHeader,
    EpisodeOutcome,
    MicroBatch,
    RankBatch,
    RoutedExperts,
    SamplingMask,
    TrainingSample,
    decode_micro_batches,
    encode_micro_batches,
)

__all__ = [
    "EpisodeOutcome",
    "BatchHeader",
    "MicroBatch",
    "RankBatch",
    "RoutedExperts",
    "SamplingMask",
    "TrainingSample",
    "decode_micro_batches",
    "encode_micro_batches",
]
