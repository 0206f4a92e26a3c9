"""One SIGKILL of every kind of process, then resume; `tests/chaos.py` does it at length."""

from __future__ import annotations

import pytest
from chaos import KINDS, chaos


@pytest.mark.slow
def test_kill_and_resume(tmp_path):
    hits = chaos(tmp_path, kills=len(KINDS), seed=1, steps=12)
    assert sum(hits.values()) == len(KINDS)
