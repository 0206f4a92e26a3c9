"""Conformance kit of routers: affinity, forwarding unchanged, streaming, and dead engines."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from prime_rl.api.router import SESSION_HEADER
from prime_rl.testing.conformance import PluginConformance
from prime_rl.testing.recording_engine import RecordingEngine

if TYPE_CHECKING:
    import httpx

GENERATE = "/inference/v1/generate"


class RouterConformance(PluginConformance):
    """Checks of a router, in front of real HTTP servers."""

    kind = "router"

    @contextmanager
    def routed(self, count: int = 3) -> Iterator[tuple[httpx.Client, list[RecordingEngine]]]:
        """A client of the router in front of `count` engines."""
        import httpx

        engines = [RecordingEngine(f"engine_{number}") for number in range(count)]
        application = self.plugin().application([engine.url for engine in engines])
        try:
            with (
                hosted(application) as url,
                httpx.Client(base_url=url, timeout=20, trust_env=False) as client,
            ):
                yield client, engines
        finally:
            for engine in engines:
                engine.stop()

    def ask(self, client: httpx.Client, session: str | None, path: str = GENERATE) -> str:
        """Name of the engine that answered."""
        headers = {} if session is None else {SESSION_HEADER: session}
        answer = client.post(path, json={"token_ids": [1]}, headers=headers)
        assert answer.status_code == 200, f"HTTP {answer.status_code}: {answer.text[:200]}"
        return str(answer.json()["engine"])

    def test_a_session_stays_on_one_engine(self) -> None:
        with self.routed() as (client, _):
            homes = {name: self.ask(client, name) for name in ("a", "b", "c", "d")}
            for _ in range(5):
                for name, home in homes.items():
                    assert self.ask(client, name) == home, f"session {name} moved"

    def test_sessions_use_every_engine(self) -> None:
        with self.routed() as (client, engines):
            homes = {self.ask(client, f"session-{number}") for number in range(30)}
            assert len(homes) == len(engines), f"30 sessions use only {sorted(homes)}"

    def test_requests_without_a_session_are_served(self) -> None:
        with self.routed() as (client, _):
            for _ in range(5):
                self.ask(client, None)

    def test_requests_and_answers_pass_unchanged(self) -> None:
        with self.routed(1) as (client, engines):
            body = bytes(range(256)) * 300
            headers = {"X-data-parallel-rank": "1", SESSION_HEADER: "s", "X-Mine": "kept"}
            answer = client.post("/teapot?a=1&b=%2F%20x", content=body, headers=headers)
            (seen,) = engines[0].seen
            assert seen.path == "/teapot?a=1&b=%2F%20x"
            assert seen.body == body
            for name, value in headers.items():
                assert seen.headers.get(name.lower()) == value, f"header {name} was lost"
            assert answer.status_code == 418, "the engine's status was changed"
            assert answer.headers["X-Tea"] == "green", "the engine's headers were lost"
            client.get("/v1/models")
            assert (engines[0].seen[-1].method, engines[0].seen[-1].path) == ("GET", "/v1/models")

    def test_streams_arrive_piece_by_piece(self) -> None:
        with self.routed(1) as (client, engines):
            engines[0].piece_interval_s = 0.1
            started = time.monotonic()
            arrivals = []
            text = b""
            with client.stream("POST", "/stream", json={}) as answer:
                assert answer.headers["content-type"].startswith("text/event-stream")
                for part in answer.iter_raw():
                    arrivals.append(time.monotonic() - started)
                    text += part
            assert text == b"".join(b"data: %d\n\n" % number for number in range(5))
            spread = arrivals[-1] - arrivals[0]
            assert spread > 0.2, f"the whole stream arrived within {spread:.2f} s: it was held back"

    def test_another_engine_answers_for_a_dead_one(self) -> None:
        with self.routed(3) as (client, engines):
            homes = {f"s{number}": self.ask(client, f"s{number}") for number in range(9)}
            dead = engines[1]
            dead.stop()
            for name, home in homes.items():
                now = self.ask(client, name)
                assert now != dead.name
                if home != dead.name:
                    assert now == home, f"session {name} moved though its engine lives"
                assert self.ask(client, name) == now, f"session {name} moved again"
            dead.restart()

    def test_an_answer_that_has_begun_is_never_asked_for_again(self) -> None:
        import httpx

        with self.routed(2) as (client, engines):
            try:
                answer = client.post("/break", json={}, headers={SESSION_HEADER: "s"})
            except httpx.HTTPError:
                pass
            else:
                assert answer.status_code >= 500 or len(answer.content) < 100
            asked = sum(engine.paths().count("/break") for engine in engines)
            assert asked == 1, f"the request was sent {asked} times"

    def test_without_any_engine_the_answer_is_an_error(self) -> None:
        with self.routed(2) as (client, engines):
            for engine in engines:
                engine.stop()
            started = time.monotonic()
            answer = client.post(GENERATE, json={}, headers={SESSION_HEADER: "s"})
            assert answer.status_code in (502, 503, 504), answer.status_code
            assert time.monotonic() - started < 15
            for engine in engines:
                engine.restart()

    def test_its_own_paths(self) -> None:
        with self.routed(2) as (client, engines):
            self.ask(client, "s")
            assert client.get("/health").status_code == 200
            assert client.get("/workers").status_code == 200
            for name in ("s", "s", "never seen"):
                answer = client.post("/finish_session", params={"session_id": name})
                assert answer.status_code == 200, f"finish_session is not idempotent: {answer.text}"
            paths = {path for engine in engines for path in engine.paths()}
            assert paths <= {GENERATE}, f"the router's own paths reached an engine: {sorted(paths)}"
            self.ask(client, "s")

    def test_many_requests_at_once(self) -> None:
        with self.routed(3) as (client, _), ThreadPoolExecutor(24) as pool:
            names = [f"s{number % 12}" for number in range(96)]
            homes = list(pool.map(lambda name: self.ask(client, name), names))
            for name in set(names):
                used = {home for other, home in zip(names, homes, strict=True) if other == name}
                assert len(used) == 1, f"session {name} was on {sorted(used)}"


@contextmanager
def hosted(application: Any) -> Iterator[str]:
    """The application behind HTTP in a thread, as a run hosts its router; yields its URL."""
    import uvicorn

    config = uvicorn.Config(
        application, port=0, log_level="error", access_log=False, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the application did not start"
        time.sleep(0.005)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)
