"""The admin client: every call reaches every engine, retries, and says who failed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from prime_rl.control.engines import EngineAdmin
from prime_rl.errors import RunError
from prime_rl.testing.recording_engine import RecordingEngine


@pytest.fixture
def pair() -> Iterator[list[RecordingEngine]]:
    engines = [RecordingEngine("a"), RecordingEngine("b")]
    yield engines
    for engine in engines:
        engine.stop()


def run(
    engines: list[RecordingEngine],
    work: Callable[[EngineAdmin], Awaitable[Any]],
    **settings: Any,
) -> Any:
    async def main() -> Any:
        async with EngineAdmin([engine.url for engine in engines], **settings) as admin:
            return await work(admin)

    return asyncio.run(main())


def test_calls_reach_every_engine_in_vllms_words(pair, tmp_path: Path) -> None:
    async def work(admin: EngineAdmin) -> list[int]:
        await admin.pause()
        await admin.update(7, tmp_path)
        await admin.resume()
        return await admin.versions()

    assert run(pair, work) == [7, 7]
    for engine in pair:
        assert engine.paths() == [
            "/pause?mode=keep&clear_cache=false",
            "/update_weights",
            "/resume",
            "/weight_info",
        ]
        body = json.loads(engine.seen[1].body)
        assert body == {"update_info": {"version": 7, "directory": str(tmp_path)}}


def test_server_errors_and_lost_connections_are_tried_again(pair) -> None:
    pair[0].fail_next = 2
    pair[1].drop_next = 1
    run(pair, lambda admin: admin.pause())
    assert [len(engine.seen) for engine in pair] == [3, 2]


def test_errors_name_the_engine_and_its_words(pair) -> None:
    pair[1].fail_next = 99
    with pytest.raises(RunError) as caught:
        run(pair, lambda admin: admin.resume(), attempts=2)
    assert "resume failed on 1 of 2 engines" in str(caught.value)
    assert f"{pair[1].url}: HTTP 500: told to fail" in str(caught.value)
    assert len(pair[1].seen) == 2


def test_refusals_are_final(pair) -> None:
    async def work(admin: EngineAdmin) -> None:
        await admin._all("teapot", lambda url: admin._post(url, "/teapot"))

    with pytest.raises(RunError, match="HTTP 418"):
        run(pair, work)
    assert [len(engine.seen) for engine in pair] == [1, 1]


def test_a_dead_engine_fails_calls_within_the_attempts(pair) -> None:
    pair[0].stop()
    started = time.monotonic()
    with pytest.raises(RunError, match=pair[0].url):
        run(pair, lambda admin: admin.pause(), attempts=3)
    assert time.monotonic() - started < 5
    pair[0].restart()


def test_health_reports_each(pair) -> None:
    assert run(pair, lambda admin: admin.health()) == {pair[0].url: True, pair[1].url: True}
    pair[0].stop()
    assert run(pair, lambda admin: admin.health()) == {pair[0].url: False, pair[1].url: True}
    pair[0].restart()


def test_waiting_for_engines_ends_when_all_answer(pair) -> None:
    pair[1].health_status = 503

    async def work(admin: EngineAdmin) -> float:
        started = time.monotonic()

        async def recover() -> None:
            await asyncio.sleep(0.2)
            pair[1].health_status = 200

        await asyncio.gather(admin.wait_ready(10), recover())
        return time.monotonic() - started

    assert 0.15 < run(pair, work) < 5


def test_waiting_for_engines_names_those_that_are_not_ready(pair) -> None:
    pair[1].health_status = 503
    with pytest.raises(RunError) as caught:
        run(pair, lambda admin: admin.wait_ready(0.2))
    assert pair[1].url in str(caught.value) and pair[0].url not in str(caught.value)


def test_no_engines_is_an_error() -> None:
    with pytest.raises(ValueError, match="no engine URLs"):
        EngineAdmin([])
