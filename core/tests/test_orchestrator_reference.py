"""Scoring a batch with a reference: what is asked, what is written, what happens when it fails."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from prime_rl.algorithms.opd import OPD, OPDConfig
from prime_rl.algorithms.opsd import OPSD, OPSDConfig
from prime_rl.algorithms.sft import SFT, SFTAlgorithmConfig
from prime_rl.api import Credit
from prime_rl.configs.frozen import FrozenModelConfig
from prime_rl.errors import RunError
from prime_rl.models.tokenizers import build_tokenizer
from prime_rl.orchestrator.columns import ReferenceView, SampleColumns
from prime_rl.orchestrator.contexts import ContextRenderer
from prime_rl.orchestrator.frozen import (
    check_scores,
    find_frozen_model,
    frozen_scorer,
    frozen_sources,
    request_headers,
)
from prime_rl.orchestrator.group import EpisodeFigures, ScoredEpisode, ScoredGroup, apply_credit
from prime_rl.orchestrator.reference import Endpoint, References, needs_reference, scored_end
from prime_rl.orchestrator.scorer import ATTEMPTS, ScoringFailed, TokenScorer, read_scores
from prime_rl.orchestrator.state import decode_leftover, encode_leftover
from prime_rl.wire import TrainingSample


class Handler(BaseHTTPRequestHandler):
    """A model whose log-probability of token t at place p is -(t + p / 100)."""

    def _reply(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self):
        self.server.seen.append((self.path, dict(self.headers)))
        status, body = self.server.pages.get(self.path, (404, {}))
        self._reply(status, body)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = self.server
        with server.lock:
            server.seen.append((body, dict(self.headers)))
            server.running += 1
            server.most_running = max(server.most_running, server.running)
            status, answer = server.answers.pop(0) if server.answers else (200, None)
        if server.slow_s:
            threading.Event().wait(server.slow_s)
        if answer is None:
            scores = [
                {str(token): {"logprob": -(token + place / 100), "rank": 1, "decoded_token": None}}
                for place, token in enumerate(body["token_ids"])
            ]
            answer = {"prompt_logprobs": [None, *scores[1:]]}
        with server.lock:
            server.running -= 1
        self._reply(status, answer)

    def log_message(self, *_):
        pass


@contextmanager
def endpoint(answers=(), pages=None, slow_s=0.0):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.seen, server.answers, server.slow_s = [], list(answers), slow_s
    server.pages = pages or {"/v1/models": (200, {"data": [{"id": "big"}]})}
    server.lock, server.running, server.most_running = threading.Lock(), 0, 0
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    server.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


def scored(token_ids, url, **settings):
    async def run():
        scorer = TokenScorer(url, "big", first_retry_s=0.001, **settings)
        try:
            return await scorer.score(token_ids, "session")
        finally:
            await scorer.close()

    return asyncio.run(run())


# One request


def test_a_request_asks_for_the_prompt_alone():
    with endpoint() as server:
        assert scored([7, 8, 9], server.url, headers={"X-Key": "k"}) == [0.0, -8.01, -9.02]
    [(body, headers)] = server.seen
    assert body == {
        "model": "big",
        "token_ids": [7, 8, 9],
        "sampling_params": {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0},
    }
    assert headers["X-Session-ID"] == "session" and headers["X-Key"] == "k"


@pytest.mark.parametrize("status", [500, 503, 429])
def test_failures_of_the_moment_are_tried_again(status):
    with endpoint(answers=[(status, {})] * (ATTEMPTS - 1)) as server:
        assert scored([1, 2], server.url) == [0.0, -2.01]
        assert len(server.seen) == ATTEMPTS
    with endpoint(answers=[(status, {"why": "busy"})] * ATTEMPTS) as server:
        with pytest.raises(ScoringFailed, match=f"failed {ATTEMPTS} times.*HTTP {status}.*busy"):
            scored([1, 2], server.url)
        assert len(server.seen) == ATTEMPTS


def test_a_refusal_is_final():
    with endpoint(answers=[(400, {"error": "too long"})]) as server:
        with pytest.raises(ScoringFailed, match="refuses: HTTP 400.*too long"):
            scored([1, 2], server.url)
        assert len(server.seen) == 1


def test_nobody_there():
    with pytest.raises(ScoringFailed, match="ConnectError"):
        scored([1, 2], "http://127.0.0.1:9")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "prompt_logprobs = None"),
        ({"prompt_logprobs": None}, "does it support"),
        ({"prompt_logprobs": [None]}, "1 entries, expected one entry for each of 2"),
        ({"prompt_logprobs": [None, {"3": {"logprob": -1}}]}, "None as log-probability of token 2"),
        ({"prompt_logprobs": [None, {"2": {"logprob": None}}]}, "position 1"),
        ({"prompt_logprobs": [None, {"2": {"logprob": float("inf")}}]}, "finite"),
        ([], "prompt_logprobs = None"),
    ],
)
def test_answers_without_scores_are_no_scores(answer, message):
    with pytest.raises(ScoringFailed, match=message):
        read_scores(answer, [1, 2])


def test_no_more_requests_at_once_than_allowed():
    async def run(url):
        scorer = TokenScorer(url, "big", max_concurrent=3)
        try:
            await asyncio.gather(*(scorer.score([1, n]) for n in range(20)))
        finally:
            await scorer.close()

    with endpoint(slow_s=0.01) as server:
        asyncio.run(run(server.url))
    assert len(server.seen) == 20 and 1 < server.most_running <= 3


# Samples


def sample(weights=(0.0, 0.0, 1.0, 1.0), tokens=(1, 2, 3, 4), mask=(False, False, True, True)):
    made = TrainingSample(
        token_ids=list(tokens),
        mask=list(mask),
        logprobs=[-0.5 if m else 0.0 for m in mask],
        temperatures=[1.0] * len(tokens),
        env_name="words",
        trace_id="t",
        branch_index=0,
    )
    assert apply_credit(made, Credit(ref_kl_weights=list(weights)))
    return made


def episode(*samples, source="words"):
    figures = EpisodeFigures(source, "completed", 0.0, 1, 2, 1, 0, 0.1, 3)
    return ScoredEpisode(figures, list(samples))


def run_references(server, episodes, most_failures=100, calls=1):
    released = []

    async def run():
        scorer = TokenScorer(server.url, "big", first_retry_s=0.001)
        references = References({"words": Endpoint(scorer, released.extend)}, most_failures)
        try:
            for _ in range(calls):
                found = await references.score(episodes)
            return found
        finally:
            await scorer.close()

    return asyncio.run(run()), released


def test_the_stream_is_written_and_sessions_are_released():
    with endpoint() as server:
        (done, failed), released = run_references(server, [episode(SampleColumns.of(sample()))])
    assert failed == []
    [columns] = done[0].samples
    assert columns.values("ref_logprobs").tolist() == pytest.approx([0.0, -2.01, -3.02, -4.03])
    assert released == ["t-reference"] == [server.seen[0][1]["X-Session-ID"]]


def test_tokens_after_the_last_trained_one_are_not_asked_for():
    made = sample((0.0, 1.0, 0.0, 0.0), mask=(False, True, False, False))
    assert scored_end(SampleColumns.of(made)) == 2
    with endpoint() as server:
        (done, _), _ = run_references(server, [episode(SampleColumns.of(made))])
    assert server.seen[0][0]["token_ids"] == [1, 2]
    found = done[0].samples[0].values("ref_logprobs").tolist()
    assert found == pytest.approx([0.0, -2.01, 0.0, 0.0])


def test_a_context_stands_before_the_branch_and_its_scores_are_dropped():
    columns = SampleColumns.of(sample(), ReferenceView((50, 51), 0))
    replacing = SampleColumns.of(sample(), ReferenceView((1, 50, 51), 1))
    with endpoint() as server:
        (done, _), _ = run_references(server, [episode(columns, replacing)])
    asked = [body["token_ids"] for body, _ in server.seen]
    assert asked == [[50, 51, 1, 2, 3, 4], [1, 50, 51, 2, 3, 4]]
    first, second = (each.values("ref_logprobs").tolist() for each in done[0].samples)
    assert first == pytest.approx([-1.02, -2.03, -3.04, -4.05])
    assert second == pytest.approx([0.0, -2.03, -3.04, -4.05])


def test_samples_without_weights_and_other_sources_are_left_alone():
    plain = sample()
    plain.ref_kl_weights = None
    assert not needs_reference(SampleColumns.of(plain))
    episodes = [
        episode(SampleColumns.of(plain)),
        episode(SampleColumns.of(sample()), source="other"),
    ]
    with endpoint() as server:
        (done, failed), _ = run_references(server, episodes)
    assert done == episodes and failed == [] and server.seen == []


def test_an_episode_is_dropped_whole_and_the_others_stay():
    bad = SampleColumns.of(sample(tokens=(1, 2, 9, 4)))
    good = SampleColumns.of(sample())
    answers = [(200, None), (400, {"error": "no"}), (200, None)]
    with endpoint(answers=answers) as server:
        (done, failed), _ = run_references(server, [episode(good, bad), episode(good)])
    assert len(done) + len(failed) == 2 and len(failed) == 1
    assert all("ref_logprobs" in each.streams for each in done[0].samples)


def test_a_reference_that_never_answers_ends_the_run_with_the_reason():
    episodes = [episode(SampleColumns.of(sample())) for _ in range(2)]
    with endpoint(answers=[(400, {"error": "no such path"})] * 9) as server:
        run_references(server, episodes, most_failures=7, calls=3)
    with (
        endpoint(answers=[(400, {"error": "no such path"})] * 9) as server,
        pytest.raises(RunError, match="none of the last 8 episodes.*no such path"),
    ):
        run_references(server, episodes, most_failures=7, calls=4)


def test_what_a_reference_is_shown_survives_a_checkpoint():
    columns = SampleColumns.of(sample(), ReferenceView((50, 51), 1))
    group = ScoredGroup(3, "words", 2, [episode(columns)], has_variance=False)
    [again] = decode_leftover(encode_leftover([group]))
    assert again.episodes[0].samples == [columns]


# Contexts


@pytest.fixture(scope="module")
def letters(tmp_path_factory):
    directory = tmp_path_factory.mktemp("letters")
    build_tokenizer("letters", directory)
    return directory


def test_messages_are_rendered_as_the_run_renders_them(letters):
    from prime_rl.models.renderers import load_renderer

    hint = [{"role": "system", "content": "abc"}]
    whole = load_renderer(letters, "chatml").render_ids(
        [*hint, {"role": "user", "content": "de"}], add_generation_prompt=True
    )
    branch = load_renderer(letters, "chatml").render_ids(
        [{"role": "user", "content": "de"}], add_generation_prompt=True
    )
    view = ContextRenderer(letters, "chatml").view(hint, branch)
    assert [*view.token_ids, *branch[view.replaced :]] == whole


class Rendered:
    def __init__(self, token_ids, message_indices):
        self.token_ids, self.message_indices = token_ids, message_indices


class StartingRenderer:
    """Writes two tokens at the start of a conversation."""

    def render(self, messages):
        return Rendered([8, 9, 30, 31], [-1, -1, 0, 0])


class SilentRenderer:
    def render(self, messages):
        return Rendered([30, 31], [-1, -1])


class ShyRenderer:
    def render(self, messages):
        raise IndexError("no user query")


def with_renderer(renderer):
    contexts = ContextRenderer("unused", "mine")
    contexts._renderer = renderer
    return contexts


def test_what_a_template_writes_at_the_start_stands_once():
    hint = [{"role": "system", "content": "abc"}]
    view = with_renderer(StartingRenderer()).view
    assert view(hint, [8, 9, 1, 2]) == ReferenceView((8, 9, 30, 31), 2)
    assert view(hint, [8, 1, 2]) == ReferenceView((8, 9, 30, 31), 0)
    assert with_renderer(SilentRenderer()).view(hint, [30, 1]) == ReferenceView((30, 31), 0)


def test_token_ids_are_taken_as_they_are():
    assert with_renderer(None).view([5, 6], [1, 2]) == ReferenceView((5, 6), 0)


def test_a_template_that_refuses_the_hint_says_so():
    hint = [{"role": "system", "content": "abc"}]
    with pytest.raises(RunError, match=r"'mine'.*\['system'\]: no user query.*another role"):
        with_renderer(ShyRenderer()).view(hint, [1])


# Frozen models


def config(url, **settings):
    return FrozenModelConfig(base_url=url, **settings)


def find(server_or_url, **settings):
    url = getattr(server_or_url, "url", server_or_url)
    return asyncio.run(
        find_frozen_model(config(url, **settings), "words", attempts=2, retry_s=0.01)
    )


def test_the_served_name_is_found():
    with endpoint() as server:
        assert find(server) == "big"
        assert find(server, name="big") == "big"
        with pytest.raises(RunError, match="'words'.*serves big, not 'small'"):
            find(server, name="small")


def test_an_endpoint_with_health_alone_needs_a_name():
    with endpoint(pages={"/health": (200, {})}) as server:
        assert find(server, name="mine") == "mine"
        with pytest.raises(RunError, match="set teacher.name"):
            find(server)


@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ({"/nothing": (200, {})}, "does not answer .*HTTP 404.*prime serve"),
        ({"/v1/models": (200, {"models": []})}, "not the expected JSON"),
        ({"/v1/models": (401, {})}, "asks for a key.*PRIME_RL_API_KEY"),
    ],
)
def test_what_is_missing_is_said(pages, message):
    with endpoint(pages=pages) as server, pytest.raises(RunError, match=message):
        find(server)


def test_nobody_at_the_url():
    with pytest.raises(RunError, match="'words' at http://127.0.0.1:9 does not answer"):
        find("http://127.0.0.1:9")


def test_the_key_comes_from_the_environment(monkeypatch):
    settings = config("http://x", api_key_var="TEACHER_KEY", headers={"X-Team": "a"})
    monkeypatch.delenv("TEACHER_KEY", raising=False)
    assert request_headers(settings) == {"X-Team": "a"}
    monkeypatch.setenv("TEACHER_KEY", "secret")
    assert request_headers(settings) == {"Authorization": "Bearer secret", "X-Team": "a"}
    with endpoint() as server:
        find(server, api_key_var="TEACHER_KEY")
    assert server.seen[0][1]["Authorization"] == "Bearer secret"


def test_the_key_may_come_from_the_recipe():
    settings = config("http://x", api_key_var="TEACHER_KEY")
    assert request_headers(settings, {"TEACHER_KEY": "k"}) == {"Authorization": "Bearer k"}
    with pytest.raises(RunError, match="TEACHER_KEY .*holds no key: expected printable ASCII"):
        request_headers(settings, {"TEACHER_KEY": "schlüssel"})


def test_a_teacher_that_cannot_score_is_named_at_the_start():
    async def check(url):
        scorer = frozen_scorer(config(url), "big")
        try:
            await check_scores(scorer, "words")
        finally:
            await scorer.close()

    with endpoint() as server:
        asyncio.run(check(server.url))
    with (
        endpoint(answers=[(200, {"choices": []})]) as server,
        pytest.raises(RunError, match="'words' does not score tokens.*prompt_logprobs"),
    ):
        asyncio.run(check(server.url))


def test_only_sources_that_a_frozen_model_plays_are_frozen():
    teacher = config("http://127.0.0.1:8001")
    algorithms = {
        "a": OPD(OPDConfig(teacher=teacher)),
        "b": SFT(SFTAlgorithmConfig(teacher=teacher)),
        "c": OPSD(OPSDConfig()),
    }
    found = frozen_sources(algorithms, {"a": "big", "b": "big"})
    assert list(found) == ["b"] and found["b"].name == "big"
