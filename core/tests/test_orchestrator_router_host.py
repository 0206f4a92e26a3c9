"""The router's application lives in a thread: it serves, releases sessions, ends, and is watched."""

import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from prime_rl.errors import RunError
from prime_rl.orchestrator.router_host import RouterHost


def make_application():
    finished: list[str] = []

    async def health(_):
        return JSONResponse({"status": "ok"})

    async def finish(request):
        finished.append(request.query_params["session_id"])
        return JSONResponse({})

    application = Starlette(
        routes=[Route("/health", health), Route("/finish_session", finish, methods=["POST"])]
    )
    return application, finished


def wait_for(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_serves_on_loopback_and_ends():
    application, finished = make_application()
    host = RouterHost(application)
    host.start()
    host.check()
    assert host.url.startswith("http://127.0.0.1:")
    assert httpx.get(f"{host.url}/health").json() == {"status": "ok"}
    host.finish_sessions(["a", "b&c=d"])
    host.finish_sessions([])
    wait_for(lambda: len(finished) == 2)
    assert finished == ["a", "b&c=d"]
    host.stop()
    host.stop()
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"{host.url}/health")


def test_an_idle_connection_outlives_the_clients_patience():
    """httpx keeps an idle connection for 5 s: the server must not close it in the same moment."""
    host = RouterHost(make_application()[0])
    host.start()
    try:
        assert host._server.config.timeout_keep_alive > 4 * httpx.Limits().keepalive_expiry
    finally:
        host.stop()


def test_releasing_after_the_end_does_nothing():
    host = RouterHost(make_application()[0])
    host.start()
    host.stop()
    host.finish_sessions(["late"])


def test_a_router_that_ends_by_itself_is_noticed():
    host = RouterHost(make_application()[0])
    host.start()
    host._server.should_exit = True
    host._thread.join(5)
    with pytest.raises(RunError, match="the router ended"):
        host.check()
    host.stop()


def test_an_application_that_cannot_start_is_an_error():
    async def broken(scope, receive, send):
        if scope["type"] == "lifespan":
            await receive()
            await send({"type": "lifespan.startup.failed", "message": "no engines"})

    host = RouterHost(broken)
    with pytest.raises(RunError):
        host.start()
        time.sleep(0.2)
        host.check()
    host.stop()
