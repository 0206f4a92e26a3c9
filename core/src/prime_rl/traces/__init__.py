"""What a run leaves behind to look at: episodes, annotations, metrics. Append-only JSON lines."""

from prime_rl.traces.annotations import AnnotationWriter
from prime_rl.traces.index import IndexEntry, read_index
from prime_rl.traces.lines import LineFollower, StreamInUse
from prime_rl.traces.metrics import MetricsWriter, read_metrics
from prime_rl.traces.reading import fold_annotations, read_episode, read_episodes
from prime_rl.traces.stream import EpisodeStream

__all__ = [
    "AnnotationWriter",
    "EpisodeStream",
    "IndexEntry",
    "LineFollower",
    "MetricsWriter",
    "StreamInUse",
    "fold_annotations",
    "read_episode",
    "read_episodes",
    "read_index",
    "read_metrics",
]
