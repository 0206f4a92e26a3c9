"""The HTTP interface of the embedded engine: shapes clients rely on, refusals, admin calls."""

from __future__ import annotations

import asyncio
import base64
import json
import math
import socket
import time

import httpx
import numpy
import pytest

GENERATE = "/inference/v1/generate"


def test_generate_has_the_shape_that_clients_read(toy) -> None:
    body = {
        "model": "toy",
        "token_ids": [10, 11, 12],
        "sampling_params": {
            "max_tokens": 5,
            "seed": 1,
            "logprobs": 1,
            "skip_special_tokens": False,
        },
        "return_token_ids": True,
        "cache_salt": "x",
        "priority": 0,
    }
    raw = toy.client.post(GENERATE, json=body, headers={"X-Session-ID": "s"}).content
    assert b'"routed_experts":{"data":"' in raw
    answer = json.loads(raw)
    assert answer["prompt_token_ids"] == [10, 11, 12]
    assert answer["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "length"
    assert len(choice["token_ids"]) == 5
    content = choice["logprobs"]["content"]
    assert [entry["token"] for entry in content] == [f"token_id:{t}" for t in choice["token_ids"]]
    assert all(math.isfinite(entry["logprob"]) and entry["logprob"] < 0 for entry in content)
    assert choice["sampling_mask"] == [[]] * 5


def test_the_published_client_parses_our_answer(toy) -> None:
    from renderers.client import _parse_completion_logprobs, parse_generate_response

    body = {"token_ids": [3, 4], "sampling_params": {"max_tokens": 4, "seed": 2}}
    raw = toy.client.post(GENERATE, json=body).content
    payload = parse_generate_response(raw)
    choice = payload["choices"][0]
    assert len(_parse_completion_logprobs(choice, choice["token_ids"])) == 4
    experts = choice["routed_experts"]
    assert experts["dtype"] == "uint8"
    rows = numpy.frombuffer(base64.b64decode(bytes(experts["data"])), dtype=experts["dtype"])
    assert rows.reshape(experts["shape"]).shape == (5, 2, 1)


def test_experts_start_where_the_request_says(toy) -> None:
    def rows(start: int) -> tuple[numpy.ndarray, int]:
        answer = toy.generate([1, 2, 3, 4], max_tokens=3, seed=1, routed_experts_prompt_start=start)
        experts = answer["choices"][0]["routed_experts"]
        data = numpy.frombuffer(base64.b64decode(experts["data"]), dtype="uint8")
        return data.reshape(experts["shape"]), experts["start"]

    everything, start = rows(0)
    later, later_start = rows(3)
    assert (everything.shape, start) == ((6, 2, 1), 0)
    assert later_start == 3
    assert (later == everything[3:]).all()
    assert set(everything[:, 0].ravel()) == {255}
    assert set(everything[:, 1].ravel()) <= {0, 1, 2, 3}


def test_the_sampling_mask_is_what_the_sampler_used(toy) -> None:
    answer = toy.generate([7], max_tokens=6, seed=5, top_k=3)
    choice = answer["choices"][0]
    for token, kept in zip(choice["token_ids"], choice["sampling_mask"], strict=True):
        assert len(kept) == 3
        assert token in kept


def test_seeds_decide_and_requests_without_one_differ(toy) -> None:
    def tokens(**sampling: int) -> list[int]:
        ids: list[int] = toy.generate([9], max_tokens=12, **sampling)["choices"][0]["token_ids"]
        return ids

    assert tokens(seed=4) == tokens(seed=4) != tokens(seed=5)
    assert tokens() != tokens()
    both = toy.generate([9], max_tokens=12, seed=4, n=2)["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    assert both[0]["token_ids"] == tokens(seed=4)
    assert both[1]["token_ids"] == tokens(seed=5)


def test_completions_run_to_the_context_limit_by_default(toy) -> None:
    answer = toy.generate([1] * 60, seed=1, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == 64


def test_chat_uses_the_models_template_and_returns_ids(toy) -> None:
    body = {
        "model": "toy",
        "messages": [{"role": "user", "content": "hi"}],
        "max_completion_tokens": 4,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "return_token_ids": True,
    }
    answer = toy.client.post("/v1/chat/completions", json=body).json()
    rendered = toy.client.post("/tokenize", json={"messages": body["messages"]}).json()
    assert answer["prompt_token_ids"] == rendered["tokens"]
    (choice,) = answer["choices"]
    same = toy.generate(rendered["tokens"], max_tokens=4, seed=3)["choices"][0]
    assert choice["token_ids"] == same["token_ids"]
    content = choice["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == pytest.approx(
        [entry["logprob"] for entry in same["logprobs"]["content"]], abs=1e-6
    )
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert choice["message"]["role"] == "assistant"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_streams_add_up_to_the_whole_answer(toy, path: str) -> None:
    body = {"max_tokens": 20, "seed": 8, "return_token_ids": True, "logprobs": True}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "hé"}]
    else:
        body |= {"prompt": "hé", "logprobs": 0}
    whole = toy.client.post(path, json=body).json()
    text, ids, logprobs, reasons = "", [], 0, []
    usage = None
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with toy.client.stream("POST", path, json=streamed) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines.pop() == "[DONE]"
    for chunk in map(json.loads, lines):
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"]["content"] if "delta" in choice else choice["text"]
            ids += choice["token_ids"]
            entries = choice["logprobs"]
            logprobs += len(entries["content"] if "content" in entries else entries["tokens"])
            reasons.append(choice["finish_reason"])
    choice = whole["choices"][0]
    assert text == (choice["message"]["content"] if "message" in choice else choice["text"])
    assert ids == choice["token_ids"]
    assert logprobs == len(ids)
    assert reasons[-1] == choice["finish_reason"] and set(reasons[:-1]) <= {None}
    assert usage == whole["usage"]


def test_stop_strings_cut_the_text(toy) -> None:
    body = {"prompt": "abc", "max_tokens": 30, "seed": 1, "return_token_ids": True}
    full = toy.client.post("/v1/completions", json=body).json()["choices"][0]
    stop = full["text"][5:7]
    place = full["text"].index(stop)
    cut = toy.client.post("/v1/completions", json={**body, "stop": [stop]}).json()["choices"][0]
    assert cut["text"] == full["text"][:place]
    assert cut["finish_reason"] == "stop"
    assert cut["token_ids"] == full["token_ids"][: len(cut["token_ids"])]
    with toy.client.stream(
        "POST", "/v1/completions", json={**body, "stop": stop, "stream": True}
    ) as answer:
        chunks = [line[6:] for line in answer.iter_lines() if line][:-1]
    assert "".join(json.loads(c)["choices"][0]["text"] for c in chunks) == cut["text"]


def test_several_prompts_as_text_or_ids(toy) -> None:
    by_text = toy.client.post(
        "/v1/completions", json={"prompt": ["ab", "c"], "seed": 1, "max_tokens": 3}
    ).json()
    ids = [toy.client.post("/tokenize", json={"prompt": p}).json()["tokens"] for p in ("ab", "c")]
    by_ids = toy.client.post(
        "/v1/completions", json={"prompt": ids, "seed": 1, "max_tokens": 3}
    ).json()
    assert [c["text"] for c in by_text["choices"]] == [c["text"] for c in by_ids["choices"]]
    assert by_ids["usage"]["prompt_tokens"] == len(ids[0]) + len(ids[1])


def test_models_health_metrics_and_weights(toy) -> None:
    (card,) = toy.client.get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == ("toy", 64)
    assert toy.client.get("/health").status_code == 200
    assert toy.client.get("/liveness").status_code == 200
    assert toy.client.get("/weight_info").json() == {"weight_version": "0"}
    before = _metric(toy, "vllm:generation_tokens_total")
    toy.generate([1], max_tokens=7, ignore_eos=True)
    assert _metric(toy, "vllm:generation_tokens_total") == before + 7
    assert _metric(toy, "vllm:num_requests_running") == 0


def _metric(toy, name: str) -> float:
    for line in toy.client.get("/metrics").text.splitlines():
        if line.startswith(name + "{"):
            return float(line.rsplit(" ", 1)[1])
    raise AssertionError(name)


REFUSED = [
    ({}, "token_ids"),
    ([], "array"),
    ({"token_ids": [], "sampling_params": {}}, "length >= 1"),
    ({"token_ids": ["1"], "sampling_params": {}}, "$.token_ids[0]"),
    ({"token_ids": [True], "sampling_params": {}}, "bool"),
    ({"token_ids": [1.5], "sampling_params": {}}, "float"),
    ({"token_ids": [-1], "sampling_params": {}}, ">= 0"),
    ({"token_ids": [100000], "sampling_params": {}}, "outside the vocabulary of"),
    ({"token_ids": [1] * 64, "sampling_params": {}}, "maximum context length is 64"),
    ({"token_ids": [1], "sampling_params": {"max_tokens": 0}}, "max_tokens"),
    ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
    ({"token_ids": [1], "sampling_params": {"temperature": 1e-6}}, "use 0 for greedy"),
    ({"token_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
    ({"token_ids": [1], "sampling_params": {"top_k": "2"}}, "top_k"),
    ({"token_ids": [1], "sampling_params": {"min_tokens": 64}}, "min_tokens is 64"),
    ({"token_ids": [1], "sampling_params": {"stop_token_ids": [10**6]}}, "stop token id"),
    ({"token_ids": [1], "sampling_params": {"presence_penalty": 0.5}}, "presence_penalty"),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": -1}}, "prompt_logprobs"),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 21}}, "prompt_logprobs"),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 0.5}}, "prompt_logprobs"),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": True}}, "prompt_logprobs"),
    ({"token_ids": [1], "sampling_params": {"prompt_logprobs": 0, "max_tokens": 0}}, "max_tokens"),
    ({"token_ids": [1], "sampling_params": {"stop": ["x"]}}, "stop_token_ids"),
    ({"token_ids": [1], "sampling_params": {"tempratur": 1}}, "tempratur"),
    ({"token_ids": [1], "sampling_params": {}, "stream": True}, "stream"),
    ({"token_ids": [1], "sampling_params": {}, "features": {"a": 1}}, "features"),
    ({"token_ids": [1], "sampling_params": {}, "priority": 3}, "priority"),
]


@pytest.mark.parametrize(("body", "part"), REFUSED)
def test_wrong_requests_are_refused_with_the_reason(toy, body: object, part: str) -> None:
    answer = toy.client.post(GENERATE, json=body)
    assert answer.status_code == 400
    assert part in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", GENERATE, 405),
        ("POST", "/pause?mode=quickly", 400),
        ("POST", "/pause?mood=keep", 400),
        ("POST", "/update_weights", 400),
    ],
)
def test_unknown_paths_and_arguments_are_json_errors(
    toy, method: str, path: str, status: int
) -> None:
    answer = toy.client.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == status


def test_another_models_name_is_refused(toy) -> None:
    body = {"model": "gpt", "token_ids": [1], "sampling_params": {}}
    answer = toy.client.post(GENERATE, json=body)
    assert answer.status_code == 404
    assert "'toy'" in answer.json()["error"]["message"]


def test_template_and_content_errors_are_the_clients(toy) -> None:
    for messages in (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
        [{"role": 3, "content": "x"}],
        [],
    ):
        answer = toy.client.post("/v1/chat/completions", json={"messages": messages})
        assert answer.status_code == 400, messages
    answer = toy.client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]},
    )
    assert "tools is not supported" in answer.json()["error"]["message"]


def test_updates_need_a_transport(toy) -> None:
    body = {"update_info": {"version": 1, "directory": "nowhere"}}
    answer = toy.client.post("/update_weights", json=body)
    assert answer.status_code == 400
    assert "without a weight transport" in answer.json()["error"]["message"]


def test_large_bodies_are_refused_before_they_are_read(serve_toy) -> None:
    server = serve_toy(settings={"max_body_mib": 1})
    answer = server.client.post(GENERATE, content=b"[" + b"1," * 2**20)
    assert answer.status_code == 413

    def pieces():
        for _ in range(40):
            yield b"1," * 2**15

    assert server.client.post(GENERATE, content=pieces()).status_code == 413


def test_overload_is_503_with_retry_after(serve_toy) -> None:
    server = serve_toy(settings={"max_running": 1, "max_queue": 1})
    server.client.post("/pause?mode=keep")

    async def flood() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            body = {"token_ids": [1], "sampling_params": {"max_tokens": 2}}
            calls = [asyncio.create_task(client.post(GENERATE, json=body)) for _ in range(5)]
            while sum(call.done() for call in calls) < 4:
                await asyncio.sleep(0.01)
            await client.post("/resume")
            return await asyncio.gather(*calls)

    answers = asyncio.run(flood())
    assert sorted(answer.status_code for answer in answers) == [200] + [503] * 4
    refused = [answer for answer in answers if answer.status_code == 503]
    assert all(answer.headers["Retry-After"] == "1" for answer in refused)


def test_a_client_that_leaves_frees_its_place(serve_toy) -> None:
    server = serve_toy()
    server.client.post("/pause?mode=keep")
    body = json.dumps({"token_ids": [1], "sampling_params": {}}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    for path, content in (
        (GENERATE, body),
        ("/v1/completions", b'{"prompt": "a", "stream": true}'),
    ):
        with socket.create_connection((host, int(port))) as client:
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
            client.sendall(head.encode() + content)
            _wait_for(lambda: _metric(server, "vllm:num_requests_waiting") == 1)
        _wait_for(lambda: _metric(server, "vllm:num_requests_waiting") == 0)


def _wait_for(condition, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_requests_queue_while_paused(serve_toy) -> None:
    server = serve_toy()
    assert server.client.get("/is_paused").json() == {"is_paused": False}
    assert server.client.post("/pause?mode=keep&clear_cache=false").json() == {"status": "paused"}
    assert server.client.get("/is_paused").json() == {"is_paused": True}

    async def ask() -> dict:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            body = {"token_ids": [1], "sampling_params": {"max_tokens": 3}}
            call = asyncio.create_task(client.post(GENERATE, json=body))
            await asyncio.sleep(0.1)
            assert not call.done()
            await client.post("/resume")
            return (await call).json()

    assert len(asyncio.run(ask())["choices"][0]["token_ids"]) == 3


def test_abort_requests_by_id(serve_toy) -> None:
    server = serve_toy()
    server.client.post("/pause?mode=keep")

    async def ask() -> dict:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            body = {"token_ids": [1], "sampling_params": {}, "request_id": "mine"}
            call = asyncio.create_task(client.post(GENERATE, json=body))
            while _metric(server, "vllm:num_requests_waiting") < 1:
                await asyncio.sleep(0.01)
            aborted = await client.post("/abort_requests", json={"request_ids": ["mine", "other"]})
            assert aborted.json()["aborted"] == 1
            return (await call).json()

    choice = asyncio.run(ask())["choices"][0]
    assert (choice["finish_reason"], choice["token_ids"]) == ("abort", [])


def test_small_answers_are_sent_at_once(toy) -> None:
    """Nagle's algorithm on the server's side would hold each back for 40 ms."""
    durations = []
    for _ in range(20):
        started = time.perf_counter()
        toy.client.post(GENERATE, content=b"{}")
        durations.append(time.perf_counter() - started)
    assert min(durations) < 0.02, f"the fastest of 20 answers took {min(durations) * 1e3:.1f} ms"
