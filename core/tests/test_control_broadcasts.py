"""The weight-update handshake: order, time-outs, skipping, pruning, leftovers."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

import pytest

from prime_rl.control import broadcasts
from prime_rl.control.broadcasts import (
    FINISHED,
    RECEIVER_READY,
    SENDER_READY,
    STARTED,
    BroadcastReceiver,
    BroadcastSender,
    HandshakeTimeout,
    prune_beyond,
)

MARKERS = (SENDER_READY, RECEIVER_READY, STARTED, FINISHED)


def markers(directory: Path) -> list[str]:
    """Markers present, in the order of the protocol."""
    return [name for name in MARKERS if (directory / name).exists()]


def ends(folder: Path, timeout_s: float = 5.0) -> tuple[BroadcastSender, BroadcastReceiver]:
    return BroadcastSender(folder, timeout_s), BroadcastReceiver(folder, timeout_s)


def test_the_four_markers_appear_in_order(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path)
    assert receiver.newest_offer(after=0) is None
    directory = sender.offer(1)
    assert markers(directory) == [SENDER_READY]
    assert receiver.newest_offer(after=0) == 1
    assert receiver.acknowledge(1) == directory
    sender.wait_ready(1)
    assert markers(directory) == [SENDER_READY, RECEIVER_READY]
    sender.start(1)
    assert not receiver.is_finished(1)
    sender.finish(1)
    assert markers(directory) == list(MARKERS)
    receiver.wait_finished(1)
    assert receiver.newest_offer(after=1) is None
    assert sorted(p.name for p in directory.iterdir()) == sorted(MARKERS)  # no temporary files


def test_the_sender_waits_until_the_engines_are_ready(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path)
    sender.offer(1)
    events: list[str] = []

    def send() -> None:
        sender.wait_ready(1)
        events.append("sender goes on")

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.1)
    events.append("engines ready")
    receiver.acknowledge(1)
    thread.join(5)
    assert events == ["engines ready", "sender goes on"]


def test_both_sides_give_up_in_time_and_say_for_what_they_waited(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path, timeout_s=0.05)
    sender.offer(3)
    started = time.monotonic()
    with pytest.raises(HandshakeTimeout, match=r"0\.05 s for engines to take version 3"):
        sender.wait_ready(3)
    with pytest.raises(HandshakeTimeout, match="the payload of version 3"):
        receiver.wait_finished(3)
    assert time.monotonic() - started < 2


def test_a_long_wait_is_reported(tmp_path: Path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(broadcasts, "WARN_S", 0.05)
    sender, _ = ends(tmp_path, timeout_s=0.3)
    sender.offer(3)
    with caplog.at_level(logging.WARNING), pytest.raises(HandshakeTimeout):
        sender.wait_ready(3)
    assert 2 <= len(caplog.records) <= 6
    assert "engines to take version 3" in caplog.text


def test_receivers_skip_to_the_newest_offer(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path)
    for version in (9, 10, 11):
        sender.offer(version)
    assert receiver.newest_offer(after=8) == 11  # by number, not by name
    assert receiver.newest_offer(after=11) is None


def test_finished_versions_are_kept_until_the_next_one_is(tmp_path: Path) -> None:
    sender, _ = ends(tmp_path)
    for version in range(1, 6):
        sender.offer(version)
        sender.finish(version)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_4", "step_5"]


def test_an_offer_empties_what_an_earlier_attempt_left(tmp_path: Path) -> None:
    sender, receiver = ends(tmp_path)
    directory = sender.offer(2)
    receiver.acknowledge(2)
    sender.finish(2)
    (directory / "weights").mkdir()
    assert sender.offer(2) == directory
    assert markers(directory) == [SENDER_READY]
    assert not (directory / "weights").exists()


def test_resuming_removes_the_abandoned_future_only(tmp_path: Path) -> None:
    """BL-076: the first version after a resume at N is N again, and nothing newer is taken."""
    sender, receiver = ends(tmp_path)
    for version in (4, 5, 10):
        sender.offer(version)
    (tmp_path / "notes").mkdir()
    (tmp_path / "step_x").mkdir()
    prune_beyond(tmp_path, 4)
    assert receiver.newest_offer(after=3) == 4
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes", "step_4", "step_x"]
    prune_beyond(tmp_path / "missing", 0)
