"""Loading needs little more memory than the weights themselves."""

import runpy
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parent / "benchmarks" / "bench_load.py"


@pytest.mark.slow
def test_loading_needs_little_more_than_the_weights() -> None:
    """Half a GB of experts, from files and as a stream: at most 64 MiB on top."""
    figures = runpy.run_path(str(BENCHMARK))["measure"](0.5)
    assert figures["weights_gigabytes"] > 0.5
    assert figures["load_extra_gigabytes"] < 0.0625, figures
    assert figures["stream_extra_gigabytes"] < 0.0625, figures
