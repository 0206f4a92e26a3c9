"""The sticky router: the kit of its kind, balance, re-pinning, sessions, cancellation."""

from __future__ import annotations

import asyncio
import threading
import time

import httpx
import pytest
from prime_rl_router_sticky import Sticky
from prime_rl_router_sticky.config import StickyConfig
from prime_rl_router_sticky.placement import Placements

from prime_rl.testing.recording_engine import RecordingEngine
from prime_rl.testing.router import GENERATE, RouterConformance, hosted


class TestSticky(RouterConformance):
    """The kit of its kind."""

    plugin_name = "sticky"


def place(placements: Placements, name: str | None, is_answered: bool = True) -> str:
    """One whole request; the engine's URL."""
    engine = placements.begin(name)
    placements.end(name, engine, is_answered)
    return engine.url


def loads(placements: Placements) -> list[int]:
    return [engine.load for engine in placements.engines]


def make(count: int = 3, **settings: float) -> Placements:
    values = {"session_idle_s": 100.0, "max_sessions": 1000, **settings}
    return Placements([f"e{number}" for number in range(count)], **values)  # type: ignore[arg-type]


def test_new_sessions_go_where_the_fewest_are() -> None:
    placements = make()
    for number in range(9):
        place(placements, f"s{number}")
    assert loads(placements) == [3, 3, 3]
    for number in (0, 3, 6):  # all on the first engine
        placements.finish(f"s{number}")
    assert loads(placements) == [0, 3, 3]
    assert [place(placements, f"t{number}") for number in range(3)] == ["e0"] * 3


def test_ties_go_to_the_engine_chosen_least_recently() -> None:
    placements = make()
    assert [place(placements, f"s{number}") for number in range(3)] == ["e0", "e1", "e2"]
    for number in (2, 1, 0):
        placements.finish(f"s{number}")
    assert [place(placements, f"t{number}") for number in range(3)] == ["e0", "e1", "e2"]


def test_requests_without_a_session_rotate_and_leave_nothing_behind() -> None:
    placements = make()
    assert [place(placements, None) for _ in range(6)] == ["e0", "e1", "e2"] * 2
    assert loads(placements) == [0, 0, 0]
    first = placements.begin(None)
    assert first.load == 1


def test_an_idle_unhealthy_engine_changes_nothing_for_the_others() -> None:
    """BL-096: healthy loads [5, 5], unhealthy 0."""
    placements = make()
    placements.mark_down(placements.engines[2])
    homes = {f"s{number}": place(placements, f"s{number}") for number in range(10)}
    assert loads(placements) == [5, 5, 0]
    for name, home in homes.items():
        assert place(placements, name) == home
    placements.engines[2].is_healthy = True
    for name, home in homes.items():
        assert place(placements, name) == home
    assert place(placements, "new") == "e2"


def test_a_session_is_bound_only_after_its_opening_succeeded() -> None:
    """BL-097: the open fails once; the retry may choose another engine."""
    placements = make()
    first = placements.begin("s")
    assert (first.url, first.load) == ("e0", 1)  # reserved at once
    placements.end("s", first, is_answered=False)
    assert loads(placements) == [0, 0, 0]
    assert "s" not in placements.sessions
    assert place(placements, "s") == "e1"
    assert place(placements, "s", is_answered=False) == "e1"  # a bound session stays
    assert place(placements, "s") == "e1"


def test_two_openings_of_one_session_share_an_engine() -> None:
    placements = make()
    first, second = placements.begin("s"), placements.begin("s")
    assert first is second
    placements.end("s", first, is_answered=False)
    assert "s" in placements.sessions  # the other may still succeed
    placements.end("s", second, is_answered=True)
    assert place(placements, "s") == first.url


def test_finishing_is_idempotent_and_late_answers_do_not_resurrect() -> None:
    """BL-098."""
    placements = make()
    engine = placements.begin("s")
    assert placements.finish("s")
    assert not placements.finish("s")
    placements.end("s", engine, is_answered=True)
    assert loads(placements) == [0, 0, 0]
    assert placements.sessions == {}
    assert engine.requests == 0


def test_a_dead_engines_sessions_move_one_by_one_and_balanced() -> None:
    placements = make()
    for number in range(9):
        place(placements, f"s{number}")
    placements.mark_down(placements.engines[0])
    moved = [place(placements, f"s{number}") for number in (0, 3, 6)]
    assert sorted(moved).count("e0") == 0
    assert loads(placements)[0] == 0
    assert sorted(loads(placements)[1:]) == [4, 5]


def test_with_no_engine_healthy_the_least_loaded_is_tried_and_then_the_next() -> None:
    placements = make(2)
    for engine in placements.engines:
        placements.mark_down(engine)
    first = placements.begin("s")
    placements.end("s", first, is_answered=False)
    second = placements.begin("s", {first})
    assert second is not None and second is not first
    placements.end("s", second, is_answered=False)
    assert placements.begin("s", {first, second}) is None
    assert loads(placements) == [0, 0]


def test_idle_sessions_are_forgotten_but_not_those_with_a_request() -> None:
    now = [0.0]
    placements = Placements(["e0", "e1"], 10.0, 100, clock=lambda: now[0])
    place(placements, "idle")
    now[0] = 9.0
    placements.begin("busy")
    now[0] = 11.0
    place(placements, "other")
    assert set(placements.sessions) == {"busy", "other"}
    now[0] = 50.0
    place(placements, "last")
    assert "busy" in placements.sessions


def test_the_number_of_sessions_is_bounded() -> None:
    placements = make(2, max_sessions=4)
    for number in range(20):
        place(placements, f"s{number}")
    assert list(placements.sessions) == ["s16", "s17", "s18", "s19"]
    assert sum(loads(placements)) == 4


@pytest.fixture
def pair():
    engines = [RecordingEngine("a"), RecordingEngine("b")]
    router = Sticky(StickyConfig(health_interval_s=0.05)).application([e.url for e in engines])
    with hosted(router) as url, httpx.Client(base_url=url, timeout=20, trust_env=False) as client:
        yield client, engines
    for engine in engines:
        engine.stop()


def ask(client: httpx.Client, session: str | None = None, path: str = GENERATE) -> httpx.Response:
    return client.post(path, json={}, headers={"X-Session-ID": session} if session else {})


def wait_for(condition, timeout_s: float = 5.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def healthy(client: httpx.Client) -> list[bool]:
    return [worker["is_healthy"] for worker in client.get("/workers").json()["workers"]]


def test_a_connection_lost_before_the_answer_is_asked_again_on_the_same_engine(pair) -> None:
    client, engines = pair
    home = ask(client, "s").json()["engine"]
    engine = next(e for e in engines if e.name == home)
    engine.drop_next = 1
    assert ask(client, "s").json()["engine"] == home
    assert len(engine.seen) == 3


def test_an_engine_that_keeps_dropping_loses_the_session(pair) -> None:
    client, engines = pair
    home = ask(client, "s").json()["engine"]
    engine = next(e for e in engines if e.name == home)
    engine.drop_next = 2
    assert ask(client, "s").json()["engine"] != home


def test_a_failed_opening_is_passed_on_and_binds_nothing(pair) -> None:
    client, engines = pair
    engines[0].fail_next = 1
    answer = ask(client, "s")
    assert (answer.status_code, engines[0].name) == (500, "a")
    assert sum(worker["sessions"] for worker in client.get("/workers").json()["workers"]) == 0
    assert ask(client, "s").json()["engine"] == "b"


def test_health_checks_take_engines_out_and_in_again(pair) -> None:
    client, engines = pair
    engines[0].health_status = 503
    wait_for(lambda: healthy(client) == [False, True])
    assert {ask(client, f"s{n}").json()["engine"] for n in range(6)} == {"b"}
    engines[1].health_status = 500
    wait_for(lambda: healthy(client) == [False, False])
    assert client.get("/health").status_code == 503
    engines[0].health_status = engines[1].health_status = 200
    wait_for(lambda: healthy(client) == [True, True])
    assert client.get("/health").status_code == 200
    assert {ask(client, f"s{n}").json()["engine"] for n in range(6)} == {"b"}
    assert ask(client, "new").json()["engine"] == "a"


def test_a_dead_engine_is_noticed_by_the_request_itself_and_comes_back(pair) -> None:
    client, engines = pair
    homes = {name: ask(client, name).json()["engine"] for name in ("s", "t")}
    moved = next(name for name, home in homes.items() if home == "a")
    engines[0].stop()
    started = time.monotonic()
    assert ask(client, moved).json()["engine"] == "b"
    assert time.monotonic() - started < 2
    engines[0].restart()
    wait_for(lambda: healthy(client) == [True, True])
    assert ask(client, moved).json()["engine"] == "b"


def test_finishing_releases_the_engine(pair) -> None:
    client, _ = pair
    ask(client, "s")
    ask(client, "t")
    for _ in range(2):
        answer = client.post("/finish_session?session_id=s")
        assert answer.json() == {"status": "ok", "session_id": "s"}
    counts = [worker["sessions"] for worker in client.get("/workers").json()["workers"]]
    assert sorted(counts) == [0, 1]
    assert client.post("/finish_session").status_code == 400


def test_a_client_that_leaves_is_left_by_the_router_too(pair) -> None:
    client, engines = pair
    with pytest.raises(httpx.ReadTimeout):
        client.post("/slow", json={}, timeout=0.3)
    wait_for(lambda: engines[0].left.is_set() or engines[1].left.is_set())
    wait_for(lambda: sum(w["requests"] for w in client.get("/workers").json()["workers"]) == 0)


def test_admin_calls_do_not_pass(pair) -> None:
    client, engines = pair
    for path in ("/pause", "/resume", "/update_weights", "/abort_requests"):
        answer = client.post(path)
        assert answer.status_code == 403
        assert "directly" in answer.json()["error"]["message"]
    assert engines[0].seen == engines[1].seen == []


def test_limits_are_refused_with_numbers() -> None:
    engine = RecordingEngine()
    router = Sticky(StickyConfig(max_body_mib=1)).application([engine.url])
    with hosted(router) as url, httpx.Client(base_url=url, trust_env=False) as client:
        assert client.post(GENERATE, content=b"x" * (2**20 + 1)).status_code == 413
        answer = client.post(GENERATE, headers={"X-Session-ID": "x" * 257})
        assert answer.status_code == 400
        assert "257" in answer.json()["error"]["message"]
    assert engine.seen == []
    engine.stop()


def test_sessions_can_be_finished_inside_the_process_without_a_connection() -> None:
    engine = RecordingEngine()
    router = Sticky(StickyConfig()).application([engine.url])
    router.placements.end("s", router.placements.begin("s"), True)
    messages = []

    async def call() -> None:
        async def receive():
            return {"type": "http.request", "body": b"", "more_body": False}

        async def send(message):
            messages.append(message)

        scope = {
            "type": "http",
            "method": "POST",
            "path": "/finish_session",
            "query_string": b"session_id=s",
            "headers": [],
        }
        await router(scope, receive, send)
        await router.close()

    asyncio.run(call())
    assert messages[0]["status"] == 200
    assert router.placements.sessions == {}
    engine.stop()


def test_many_sessions_from_many_threads_keep_their_engines(pair) -> None:
    client, _ = pair
    homes: dict[str, set[str]] = {f"s{number}": set() for number in range(16)}

    def play(name: str) -> None:
        with httpx.Client(base_url=client.base_url, trust_env=False) as own:
            for _ in range(5):
                homes[name].add(ask(own, name).json()["engine"])

    threads = [threading.Thread(target=play, args=(name,)) for name in homes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(len(home) == 1 for home in homes.values())
    counts = [worker["sessions"] for worker in client.get("/workers").json()["workers"]]
    assert counts == [8, 8]
