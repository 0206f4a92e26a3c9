"""Order of a weight update, seen by a recording engine: pause, ready, transfer, commit, resume."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from prime_rl.api import NamedTensor
from prime_rl.control.broadcasts import BroadcastReceiver, BroadcastSender
from prime_rl.control.engines import EngineAdmin
from prime_rl.errors import RunError
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.watcher import WeightWatcher
from prime_rl.plugins import scan
from prime_rl.testing.recording_engine import RecordingEngine
from prime_rl.testing.weight_transport import awkward_tensors

TRANSPORTS = scan().names("weight_transport")
PAUSE = "/pause?mode=keep&clear_cache=false"


@pytest.fixture
def engines() -> Iterator[list[RecordingEngine]]:
    pair = [RecordingEngine("a"), RecordingEngine("b")]
    yield pair
    for engine in pair:
        engine.stop()


class Trainer(threading.Thread):
    """The sending side, with the time of each of its steps."""

    def __init__(self, name: str, folder: Path, version: int) -> None:
        super().__init__(daemon=True)
        registry = scan()
        section = registry.config_class("weight_transport", name)(type=name)
        self.sender = registry.load("weight_transport", name)(section).sender(0, 1)
        self.handshake = BroadcastSender(folder, 5.0)
        self.version = version
        self.times: dict[str, float] = {}

    def run(self) -> None:
        directory = self.handshake.offer(self.version)
        self.note("offered")
        self.handshake.wait_ready(self.version)
        self.note("ready")
        self.handshake.start(self.version)
        self.sender.send(self.version, directory, self.tensors())
        self.note("transferred")
        self.handshake.finish(self.version)

    def tensors(self) -> Iterator[NamedTensor]:
        self.note("transfer begins")
        yield from awkward_tensors()

    def note(self, what: str) -> None:
        self.times[what] = time.monotonic()


def take(
    folder: Path, engines: list[RecordingEngine], version: int, pauses: bool, attempts: int = 2
) -> Policy:
    """The receiving side: one update through the watcher."""
    policy = Policy(version=0, published=0)

    async def main() -> None:
        async with EngineAdmin([engine.url for engine in engines], attempts=attempts) as admin:
            watcher = WeightWatcher(
                BroadcastReceiver(folder, 5.0),
                admin,
                policy,
                pauses_engines=pauses,
                on_pending=lambda version: None,
                on_published=lambda version: None,
                on_applied=lambda version: None,
                may_take=lambda: True,
            )
            await watcher.wait_for(version, 5.0)

    asyncio.run(main())
    return policy


def times(engine: RecordingEngine) -> dict[str, float]:
    return {request.path: request.at for request in engine.seen}


@pytest.mark.parametrize("name", TRANSPORTS)
def test_pause_ready_transfer_commit_resume(
    name: str, tmp_path: Path, engines: list[RecordingEngine]
) -> None:
    """BL-081, for every transport that wants the engines paused."""
    pauses = scan().load("weight_transport", name).capabilities.get("pauses_engines", True)
    trainer = Trainer(name, tmp_path, 3)
    trainer.start()
    policy = take(tmp_path, engines, 3, pauses)
    trainer.join(5)
    assert policy.version == policy.published == 3
    for engine in engines:
        assert engine.weight_version == 3
        seen = times(engine)
        if pauses:
            assert engine.paths() == [PAUSE, "/update_weights", "/resume"]
            assert trainer.times["offered"] < seen[PAUSE] < trainer.times["ready"]
            assert seen["/update_weights"] < seen["/resume"]
        assert trainer.times["ready"] <= trainer.times["transfer begins"]
        assert trainer.times["transferred"] < seen["/update_weights"]
    others = [times(engine) for engine in engines]
    if pauses:  # no engine resumes before every engine has the weights
        assert max(t["/update_weights"] for t in others) < min(t["/resume"] for t in others)


def test_a_transport_that_needs_no_pause_gets_none(
    tmp_path: Path, engines: list[RecordingEngine]
) -> None:
    """BL-100."""
    trainer = Trainer("filesystem", tmp_path, 1)
    trainer.start()
    take(tmp_path, engines, 1, pauses=False)
    assert [engine.paths() for engine in engines] == [["/update_weights"]] * 2


def test_engines_resume_after_a_failed_update(
    tmp_path: Path, engines: list[RecordingEngine]
) -> None:
    trainer = Trainer("filesystem", tmp_path, 1)
    trainer.start()
    original = engines[1]

    def refuse_update() -> None:
        while PAUSE not in original.paths():
            time.sleep(0.001)
        original.fail_next = 2

    refusing = threading.Thread(target=refuse_update, daemon=True)
    refusing.start()
    with pytest.raises(RunError, match="update to version 1 failed on 1 of 2 engines"):
        take(tmp_path, engines, 1, pauses=True)
    for engine in engines:
        assert engine.paths()[-1] == "/resume"


def test_engines_resume_when_the_payload_never_comes(
    tmp_path: Path, engines: list[RecordingEngine]
) -> None:
    BroadcastSender(tmp_path, 0.1).offer(1)

    async def main() -> None:
        async with EngineAdmin([engine.url for engine in engines]) as admin:
            watcher = WeightWatcher(
                BroadcastReceiver(tmp_path, 0.2),
                admin,
                Policy(version=0, published=0),
                pauses_engines=True,
                on_pending=lambda version: None,
                on_published=lambda version: None,
                on_applied=lambda version: None,
                may_take=lambda: True,
            )
            await watcher.take(1)

    with pytest.raises(RunError, match="did not arrive within"):
        asyncio.run(main())
    assert [engine.paths() for engine in engines] == [[PAUSE, "/resume"]] * 2
