"""Conformance kit of engines: the HTTP contract, honest log-probabilities, live weight updates.

Served values are compared with a forward of the model's own module: an answer of 200 proves
nothing.
"""

from __future__ import annotations

import base64
import json
import math
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from prime_rl.configs.base import ValidationContext
from prime_rl.plugins.recipes import find_recipes
from prime_rl.testing.conformance import PluginConformance
from prime_rl.testing.served_engine import EngineClient, serve_engine

if TYPE_CHECKING:
    from torch import Tensor

    from prime_rl.api import NamedTensor
    from prime_rl.models.setup import ModelSetup

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MAX_MODEL_LEN = 128


@dataclass
class Reference:
    """A checkpoint and its own module, to score with."""

    directory: Path
    setup: ModelSetup
    module: Any

    def logprobs(self, tokens: list[int], first: int, temperature: float = 1.0) -> list[float]:
        """Log-probabilities of tokens[first:], one document, whole vocabulary, float32."""
        scores = self.scores(tokens, temperature)
        return [float(scores[place - 1, tokens[place]]) for place in range(first, len(tokens))]

    def scores(self, tokens: list[int], temperature: float = 1.0) -> Tensor:
        """float32 [T, V]: log-probabilities of what may follow each token."""
        import torch

        from prime_rl.api import PackedBatch
        from prime_rl.models.head import head_weight

        with torch.no_grad():
            batch = PackedBatch.from_documents([tokens])
            hidden = self.setup.plugin.forward(self.module, batch).float()
            logits = hidden @ head_weight(self.module).float().T / temperature
            return torch.log_softmax(logits, dim=-1)

    def tensors(self) -> list[NamedTensor]:
        """The checkpoint's tensors."""
        from prime_rl.models.save import iter_checkpoint

        return list(iter_checkpoint(self.module, self.setup.layout))


@dataclass
class Served:
    """The engine under test, the weights it starts with, and others to send it."""

    client: EngineClient
    first: Reference
    second: Reference
    broadcasts: Path
    version: int = 0

    def update(self, reference: Reference) -> None:
        """Send weights through the filesystem transport and let the engine take them."""
        from prime_rl.plugins import scan

        self.version += 1
        directory = self.broadcasts / f"step_{self.version}"
        directory.mkdir(parents=True)
        registry = scan()
        section = registry.config_class("weight_transport", "filesystem")(type="filesystem")
        transport = registry.load("weight_transport", "filesystem")(section)
        transport.sender(0, 1).send(self.version, directory, iter(reference.tensors()))
        info = {"version": self.version, "directory": str(directory)}
        self.client.post("/update_weights", {"update_info": info})


class EngineConformance(PluginConformance):
    """Checks of an engine that serves a small model in float32 on this machine."""

    kind = "engine"
    architecture: ClassVar[Mapping[str, Any]] = {}
    """config.json of the model to serve. Empty: one from the recipes of installed model plugins."""
    arguments: ClassVar[tuple[str, ...]] = ()
    """Further arguments of `prime serve`."""
    tolerance: ClassVar[float] = 2e-5
    """Largest difference of a served log-probability from the module's own, in nats."""
    takes_updates: ClassVar[bool] = True
    """Weights can be replaced while it serves (needs the filesystem transport installed)."""

    @pytest.fixture(scope="class")
    def engine(self, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
        """The engine under test, one for all checks of the class."""
        with self.serve(tmp_path_factory.mktemp("engine")) as served:
            yield served

    @contextmanager
    def serve(self, folder: Path) -> Iterator[Served]:
        """Make two sets of weights and serve the first."""
        first, second = (self.make_reference(folder / f"model_{seed}", seed) for seed in (0, 1))
        updates = ("--weight-transport", "filesystem") if self.takes_updates else ()
        with serve_engine(
            first.directory,
            *("--engine", self.plugin_name, "--dtype", "float32", "--device", "cpu"),
            *("--max-model-len", str(MAX_MODEL_LEN), "--name", "served"),
            *updates,
            *self.arguments,
        ) as client:
            yield Served(client, first, second, folder / "broadcasts")

    def make_reference(self, directory: Path, seed: int) -> Reference:
        """A checkpoint with random weights."""
        from prime_rl.configs.model import FreshModelConfig, ModelConfig
        from prime_rl.models.fresh import make_fresh_model
        from prime_rl.models.load import load_weights
        from prime_rl.models.setup import build, prepare

        registry = self.registry()
        context = ValidationContext(registry.config_class)
        model = ModelConfig.model_validate({"name": str(directory)}, context=context)
        architecture = dict(self.architecture) or self.any_architecture()
        fresh = FreshModelConfig(architecture=architecture, seed=seed)
        make_fresh_model(fresh, model, directory, registry)
        setup = prepare(model, directory, registry)
        module = build(setup)
        load_weights(module, setup.layout, directory, "cpu")
        return Reference(directory, setup, module.eval().requires_grad_(False))

    def any_architecture(self) -> dict[str, Any]:
        """The first small model that an installed model plugin's recipes describe."""
        for record in self.registry().of_kind("model"):
            for path in find_recipes(record).values():
                recipe = tomllib.loads(path.read_text())
                for table in (recipe, *recipe.get("stages", [])):
                    fresh = table.get("model", {}).get("fresh", {})
                    if "architecture" in fresh:
                        return dict(fresh["architecture"])
        raise AssertionError(
            "no installed model plugin ships a recipe with [model.fresh.architecture]; install one "
            "or set `architecture`"
        )

    def check_scores(
        self, reference: Reference, tokens: list[int], found: list[float], temperature: float = 1.0
    ) -> None:
        """The last len(found) tokens' served log-probabilities are the module's."""
        expected = reference.logprobs(tokens, len(tokens) - len(found), temperature)
        worst = max(abs(a - b) for a, b in zip(expected, found, strict=True))
        assert worst <= self.tolerance, f"served and own log-probabilities differ by {worst:.2e}"

    def test_capabilities_are_declared(self) -> None:
        capabilities = self.plugin_class().capabilities  # type: ignore[attr-defined]
        assert capabilities.get("devices"), "capabilities must name the devices it runs on"
        for name in ("routed_experts", "sampling_mask", "lora"):
            assert isinstance(capabilities.get(name), bool), f"capabilities must state {name}"

    def test_generate_has_the_shape_that_clients_read(self, engine: Served) -> None:
        body = {
            "model": engine.client.get("/v1/models")["data"][0]["id"],
            "token_ids": PROMPT,
            "sampling_params": {"max_tokens": 5, "logprobs": 1, "skip_special_tokens": False},
            "cache_salt": "0",
        }
        raw = engine.client.http.post(
            "/inference/v1/generate", json=body, headers={"X-Session-ID": "s"}
        )
        assert raw.status_code == 200, raw.text
        answer = raw.json()
        (choice,) = answer["choices"]
        tokens, content = choice["token_ids"], choice["logprobs"]["content"]
        assert 1 <= len(tokens) <= 5 and len(content) == len(tokens)
        assert choice["finish_reason"] in ("stop", "length")
        for token, entry in zip(tokens, content, strict=True):
            assert entry["token"] == f"token_id:{token}", entry["token"]
            assert math.isfinite(entry["logprob"]) and entry["logprob"] <= 0
        assert answer["usage"]["prompt_tokens"] == len(PROMPT)

    def test_prompts_are_scored_at_temperature_one(self, engine: Served) -> None:
        """In the shape of vLLM; engines that declare `prompt_logprobs`."""
        if not self.plugin_class().capabilities.get("prompt_logprobs"):  # type: ignore[attr-defined]
            return
        for temperature in (1.0, 0.5):
            answer = engine.client.post(
                "/inference/v1/generate",
                {
                    "token_ids": PROMPT,
                    "sampling_params": {
                        "max_tokens": 1,
                        "temperature": temperature,
                        "prompt_logprobs": 0,
                    },
                },
            )
            first, *others = answer["prompt_logprobs"]
            assert first is None and len(others) == len(PROMPT) - 1
            found = [
                position[str(token)]["logprob"]
                for position, token in zip(others, PROMPT[1:], strict=True)
            ]
            self.check_scores(engine.first, PROMPT, found)

    def test_logprobs_are_the_modules_own_at_the_sampling_temperature(self, engine: Served) -> None:
        for temperature in (1.0, 0.6, 1.7):
            choice = engine.client.generate(
                PROMPT, max_tokens=20, temperature=temperature, ignore_eos=True
            )
            assert len(choice["token_ids"]) == 20
            tokens = PROMPT + choice["token_ids"]
            self.check_scores(engine.first, tokens, logprobs_of(choice), temperature)

    def test_logprobs_are_renormalised_over_the_candidates(self, engine: Served) -> None:
        """BL-023: with top-k, the candidates' probabilities add up to one."""
        choice = engine.client.generate(PROMPT, max_tokens=4, top_k=3, logprobs=3, ignore_eos=True)
        for entry in choice["logprobs"]["content"]:
            candidates = entry["top_logprobs"]
            assert len(candidates) == 3
            total = sum(math.exp(other["logprob"]) for other in candidates)
            assert abs(total - 1) < 1e-4, f"3 candidates of top-k 3 have probability {total}"
            assert entry["token"] in [other["token"] for other in candidates]

    def test_greedy_takes_the_likeliest(self, engine: Served) -> None:
        choice = engine.client.generate(PROMPT, max_tokens=12, temperature=0, ignore_eos=True)
        tokens = PROMPT + choice["token_ids"]
        scores = engine.first.scores(tokens)
        for place in range(len(PROMPT), len(tokens)):
            best = float(scores[place - 1].max())
            assert float(scores[place - 1, tokens[place]]) >= best - self.tolerance

    def test_seeds_decide(self, engine: Served) -> None:
        def tokens(seed: int) -> list[int]:
            found: list[int] = engine.client.generate(PROMPT, max_tokens=16, seed=seed)["token_ids"]
            return found

        assert tokens(1) == tokens(1)
        assert len({tuple(tokens(seed)) for seed in range(5)}) > 1

    def test_company_changes_nothing(self, engine: Served) -> None:
        def ask(number: int) -> tuple[list[int], list[float]]:
            choice = engine.client.generate(
                PROMPT[: 1 + number % 8], max_tokens=10 + number, seed=number, ignore_eos=True
            )
            return choice["token_ids"], logprobs_of(choice)

        with ThreadPoolExecutor(16) as pool:
            together = list(pool.map(ask, range(16)))
        for number in (0, 7, 15):
            tokens, logprobs = ask(number)
            assert together[number][0] == tokens, "a sequence depends on what runs beside it"
            worst = max(abs(a - b) for a, b in zip(logprobs, together[number][1], strict=True))
            assert worst <= self.tolerance

    def test_stop_tokens_and_limits(self, engine: Served) -> None:
        free = engine.client.generate(PROMPT, max_tokens=12, seed=3, ignore_eos=True)
        stop = free["token_ids"][5]
        place = free["token_ids"].index(stop)
        ended = engine.client.generate(
            PROMPT, max_tokens=12, seed=3, ignore_eos=True, stop_token_ids=[stop]
        )
        assert ended["token_ids"] == free["token_ids"][: place + 1]
        assert (free["finish_reason"], ended["finish_reason"]) == ("length", "stop")
        full = engine.client.answer([1] * (MAX_MODEL_LEN - 4), ignore_eos=True)
        assert full["usage"]["total_tokens"] == MAX_MODEL_LEN

    def test_wrong_requests_get_clear_errors(self, engine: Served) -> None:
        path = "/inference/v1/generate"
        cases: list[tuple[str, bytes, tuple[int, ...]]] = [
            (path, b"{", (400, 422)),
            (path, b"[]", (400, 422)),
            (path, b'{"token_ids": [], "sampling_params": {}}', (400, 422)),
            (path, b'{"token_ids": ["x"], "sampling_params": {}}', (400, 422)),
            (path, b'{"token_ids": [1], "sampling_params": {"max_tokens": -1}}', (400, 422)),
            (path, json.dumps(
                {"token_ids": [1] * (MAX_MODEL_LEN + 1), "sampling_params": {}}
            ).encode(), (400,)),
            ("/no/such/path", b"{}", (404,)),
        ]  # fmt: skip
        for where, body, expected in cases:
            answer = engine.client.http.post(
                where, content=body, headers={"Content-Type": "application/json"}
            )
            assert answer.status_code in expected, f"{body[:60]!r}: HTTP {answer.status_code}"
            assert answer.json(), "an error without a JSON body"
        assert engine.client.http.get("/health").status_code == 200

    def test_pause_keeps_requests_and_resume_ends_them(self, engine: Served) -> None:
        whole = engine.client.generate(PROMPT, max_tokens=100, seed=11, ignore_eos=True)
        engine.client.post("/pause?mode=keep&clear_cache=false")
        assert engine.client.get("/is_paused") == {"is_paused": True}
        results: list[dict[str, Any]] = []
        asking = threading.Thread(
            target=lambda: results.append(
                engine.client.generate(PROMPT, max_tokens=100, seed=11, ignore_eos=True)
            )
        )
        asking.start()
        asking.join(0.3)
        assert asking.is_alive(), "a request was answered while the engine was paused"
        engine.client.post("/resume")
        asking.join(30)
        assert results[0]["token_ids"] == whole["token_ids"]
        assert engine.client.get("/is_paused") == {"is_paused": False}

    def test_a_client_that_leaves_frees_its_place(self, engine: Served) -> None:
        import httpx

        engine.client.post("/pause?mode=keep&clear_cache=false")
        with pytest.raises(httpx.ReadTimeout):
            engine.client.http.post(
                "/inference/v1/generate",
                json={"token_ids": PROMPT, "sampling_params": {}},
                timeout=0.3,
            )
        engine.client.post("/resume")
        deadline = time.monotonic() + 10
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        while any(engine.client.metric(name) for name in names):
            assert time.monotonic() < deadline, "the abandoned request is still there"
            time.sleep(0.05)

    def test_chat_and_completions(self, engine: Served) -> None:
        chat = engine.client.post(
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "hi"}],
                "max_tokens": 4,
                "seed": 1,
                "return_token_ids": True,
            },
        )
        plain = engine.client.post(
            "/v1/completions",
            {
                "prompt": chat["prompt_token_ids"],
                "max_tokens": 4,
                "seed": 1,
                "return_token_ids": 1 == 1,
            },
        )
        assert chat["choices"][0]["message"]["role"] == "assistant"
        assert plain["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]

    def test_new_weights_are_served_and_old_ones_can_come_back(self, engine: Served) -> None:
        if not self.takes_updates:
            return
        for reference in (engine.second, engine.first):
            engine.update(reference)
            assert engine.client.get("/weight_info") == {"weight_version": str(engine.version)}
            choice = engine.client.generate(PROMPT, max_tokens=16, ignore_eos=True)
            self.check_scores(reference, PROMPT + choice["token_ids"], logprobs_of(choice))

    def test_running_requests_survive_an_update(self, engine: Served) -> None:
        """Each token is scored by the weights it was drawn with, over the whole text so far."""
        if not self.takes_updates:
            return
        results: list[dict[str, Any]] = []

        def ask(seed: int) -> None:
            results.append(
                engine.client.generate(PROMPT, max_tokens=100, seed=seed, ignore_eos=True)
            )

        asking = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in asking:
            thread.start()
        deadline = time.monotonic() + 10
        while engine.client.metric("vllm:num_requests_running") < 4:
            if time.monotonic() > deadline or not all(thread.is_alive() for thread in asking):
                break
        engine.client.post("/pause?mode=keep&clear_cache=false")
        engine.update(engine.second)
        engine.client.post("/resume")
        for thread in asking:
            thread.join(60)
        engine.update(engine.first)
        assert len(results) == 4
        for choice in results:
            tokens, served = PROMPT + choice["token_ids"], logprobs_of(choice)
            assert len(served) == 100
            old = engine.first.logprobs(tokens, len(PROMPT))
            new = engine.second.logprobs(tokens, len(PROMPT))
            fits_old = [abs(a - b) <= self.tolerance for a, b in zip(old, served, strict=True)]
            fits_new = [abs(a - b) <= self.tolerance for a, b in zip(new, served, strict=True)]
            switch = fits_old.index(False) if False in fits_old else len(served)
            assert all(fits_new[switch:]), (
                f"after the update at token {switch}, log-probabilities are those of neither weights"
            )

    def test_a_damaged_update_is_refused_and_the_engine_goes_on(self, engine: Served) -> None:
        if not self.takes_updates:
            return
        directory = engine.broadcasts / "step_999"
        directory.mkdir(parents=True, exist_ok=True)
        before = engine.client.get("/weight_info")
        info = {"version": 999, "directory": str(directory)}
        answer = engine.client.http.post("/update_weights", json={"update_info": info})
        assert answer.status_code >= 400
        assert engine.client.get("/weight_info") == before
        choice = engine.client.generate(PROMPT, max_tokens=8, ignore_eos=True)
        self.check_scores(engine.first, PROMPT + choice["token_ids"], logprobs_of(choice))


def logprobs_of(choice: Mapping[str, Any]) -> list[float]:
    """Log-probabilities of a choice's tokens."""
    return [entry["logprob"] for entry in choice["logprobs"]["content"]]


def experts_of(choice: Mapping[str, Any]) -> Any:
    """Routed experts of a choice as an array [positions, layers, top_k]."""
    import numpy

    experts = choice["routed_experts"]
    data = numpy.frombuffer(base64.b64decode(experts["data"]), dtype=experts["dtype"])
    return data.reshape(experts["shape"])
