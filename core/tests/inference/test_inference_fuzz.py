"""Malformed requests of every sort: never a 500, never a hang, and the engine serves afterwards."""

from __future__ import annotations

import json
import random
import socket
import string
from typing import Any

import pytest

VALID: dict[str, dict[str, Any]] = {
    "/inference/v1/generate": {
        "model": "toy",
        "token_ids": [1, 2, 3],
        "sampling_params": {
            "temperature": 0.8,
            "top_p": 0.9,
            "top_k": 5,
            "min_p": 0.1,
            "max_tokens": 3,
            "min_tokens": 1,
            "stop_token_ids": [4],
            "seed": 1,
            "logprobs": 2,
            "n": 1,
        },
        "request_id": "r",
        "return_token_ids": True,
    },
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 3,
        "logprobs": True,
        "top_logprobs": 1,
        "stop": ["a"],
        "stream": False,
    },
    "/v1/completions": {"prompt": "hello", "max_tokens": 3, "logprobs": 1, "stream": True},
    "/tokenize": {"prompt": "hello"},
    "/abort_requests": {"request_ids": ["r"]},
    "/update_weights": {"update_info": {"version": 1, "directory": "x"}},
}
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, 2**70, -(2**70), 1e308, -1e308, 0.5, "", "x", "\ud7ff",
    "x" * 5000, [], [[]], [None], [[[[[[]]]]]], {}, {"a": {}}, [1] * 200, ["a", 1], [-1], [10**9],
]  # fmt: skip
RAW = [
    b"",
    b"\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x00\x01\x02\xff" * 50,
    b"GET /health HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: ten\r\n\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\n\r\n{",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\n",
    b"POST /inference/v1/generate HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n{}",
    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /../../etc/passwd HTTP/1.1\r\nHost: x\r\n\r\n",
    b"GET /%00%ff%2e%2e HTTP/1.1\r\nHost: x\r\n\r\n",
]


def mutate(draw: random.Random, value: Any) -> Any:
    """The value with one place replaced, removed, renamed or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        key = draw.choice(sorted(value))
        changed = dict(value)
        action = draw.randrange(4)
        if action == 0:
            del changed[key]
        elif action == 1:
            changed["".join(draw.choices(string.printable, k=draw.randrange(12)))] = value[key]
        else:
            changed[key] = mutate(draw, value[key])
        return changed
    if isinstance(value, list) and value and draw.random() < 0.5:
        place = draw.randrange(len(value))
        return [*value[:place], mutate(draw, value[place]), *value[place:]]
    return draw.choice(ODD_VALUES)


def body(draw: random.Random, path: str) -> bytes:
    """A body that is probably wrong."""
    kind = draw.randrange(10)
    if kind == 0:
        return draw.randbytes(draw.randrange(200))
    if kind == 1:
        return b"[" * draw.randrange(1, 100_000)
    value: Any = VALID.get(path, {})
    for _ in range(draw.randrange(1, 4)):
        value = mutate(draw, value)
    text = json.dumps(value).encode()
    if kind == 2:
        return text[: draw.randrange(len(text) + 1)]
    if kind == 3:
        place = draw.randrange(len(text) + 1)
        return text[:place] + draw.randbytes(3) + text[place:]
    return text


def send_raw(url: str, content: bytes) -> bytes:
    """Send bytes, close our side, read what comes."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        try:
            connection.sendall(content)
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(65536)
        except ConnectionError:
            return b""  # cut off: an answer too


def attack(server, count: int, seed: int) -> None:
    draw = random.Random(seed)
    known = [*VALID, "/pause", "/resume", "/health", "/metrics", "/v1/models", "/weight_info"]
    for number in range(count):
        if number % 12 == 0:
            answer = send_raw(server.url, draw.choice(RAW))
            assert not answer.startswith(b"HTTP/1.1 5"), answer[:300]
            continue
        path = draw.choice([*VALID] * 4 + known)
        if draw.random() < 0.05:
            path = "/" + "".join(draw.choices(string.ascii_letters + "/%?#&=.", k=12))
        query = (
            {"mode": draw.choice(["keep", "wait", "abort", "", "x"])} if path == "/pause" else {}
        )
        method = "POST" if draw.random() < 0.9 else draw.choice(["GET", "PUT", "DELETE", "PATCH"])
        content = body(draw, path)
        answer = server.client.request(
            method, path, params=query, content=content, headers={"Content-Type": "text/plain"}
        )
        assert answer.status_code < 500, (path, content[:500], answer.text[:500])
        assert "Traceback" not in answer.text
        if path == "/pause":
            server.client.post("/resume")
    health = server.client.get("/health")
    assert health.status_code == 200
    assert len(server.generate([1, 2], max_tokens=4, ignore_eos=True)["choices"]) == 1
    assert server.client.get("/metrics").status_code == 200


def test_300_malformed_requests(serve_toy) -> None:
    attack(serve_toy(), 300, seed=1)


@pytest.mark.slow
def test_2000_malformed_requests(serve_toy) -> None:
    attack(serve_toy(), 2000, seed=2)
