"""A served toy model: on disk, in a loop of its own, behind HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from prime_rl.api.engine import EngineSpec
from prime_rl.api.model import Kernels
from prime_rl.api.transport import Receiver
from prime_rl.configs.base import PluginConfig
from prime_rl.inference.embedded import EmbeddedConfig
from prime_rl.inference.engine_loop import ENDED, EngineLoop
from prime_rl.inference.runner import ModelRunner
from prime_rl.inference.sequence import SamplingParams, Sequence
from prime_rl.inference.serve import load_runner, serve_model
from prime_rl.models.save import iter_checkpoint, save_checkpoint
from prime_rl.models.setup import ModelSetup, build
from prime_rl.models.tokenizers import build_tokenizer
from prime_rl.testing.toy_model import ToyModel, ToyModelWithoutDecoder


def toy_setup(
    directory: Path, seed: int, plugin: type[ToyModel] = ToyModel, **config_json: Any
) -> ModelSetup:
    """A toy checkpoint with a byte tokenizer; the setup that serves it."""
    directory.mkdir(parents=True, exist_ok=True)
    vocabulary = build_tokenizer("bytes", directory)
    config = {"model_type": "toy", "vocab_size": vocabulary, "num_experts": 4, **config_json}
    model = plugin(PluginConfig(type="toy"))
    architecture = model.architecture(config)
    setup = ModelSetup(
        plugin=model,
        architecture=architecture,
        kernels=Kernels(attention=None, moe=()),  # type: ignore[arg-type]
        layout=model.layout(architecture),
        config_json=config,
        model_dir=directory / "model",
    )
    module = build(setup, "cpu")
    model.initialise(module, torch.Generator().manual_seed(seed))
    save_checkpoint(
        setup.model_dir, iter_checkpoint(module, setup.layout), config, tokenizer_source=directory
    )
    return setup


def toy_spec(setup: ModelSetup, url_file: Path, **changes: Any) -> EngineSpec:
    """A spec that serves the toy on the loopback."""
    values: dict[str, Any] = dict(
        model_dir=setup.model_dir,
        served_name="toy",
        host="127.0.0.1",
        port=0,
        url_file=url_file,
        device="cpu",
        threads=1,
        max_model_len=64,
        compute_dtype="float32",
        index=0,
        count=1,
        seed=0,
        return_routed_experts=False,
        return_sampling_mask=False,
        model_plugin="toy",
        model_section=None,
        weight_transport=None,
    )
    return EngineSpec(**{**values, **changes})


class Driver:
    """An engine loop that is asked directly, without HTTP."""

    def __init__(self, setup: ModelSetup, **settings: Any) -> None:
        config = EmbeddedConfig(**settings)
        self.setup = setup
        spec = toy_spec(setup, Path("unused"), return_routed_experts=True)
        self.runner: ModelRunner = load_runner(config, spec, setup)
        self.loop = EngineLoop(
            self.runner,
            max_running=config.max_running,
            max_queue=config.max_queue,
            max_batch_tokens=config.max_batch_tokens,
            max_model_len=spec.max_model_len,
            deliver=self._deliver,
        )
        self.steps: list[list[tuple[str, int]]] = []
        self._ended = threading.Condition()

    def _deliver(self, progress: list[tuple[Sequence, int]]) -> None:
        with self._ended:
            self.steps.append([(sequence.request_id, length) for sequence, length in progress])
            self._ended.notify_all()

    def sequence(self, name: str, tokens: list[int], **params: Any) -> Sequence:
        """A sequence that reports every step."""
        chosen = SamplingParams(**{"max_tokens": 8, **params})
        return Sequence(
            name, list(tokens), len(tokens), chosen,
            notify=lambda *_: None, wants_kept=True, wants_routes=True,
        )  # fmt: skip

    def wait_for(self, condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
        """Wait until a step makes the condition true."""
        with self._ended:
            assert self._ended.wait_for(condition, timeout_s), "the engine did not get there"

    def finish(self, *sequences: Sequence) -> None:
        """Submit, start if needed, and wait for the end of all."""
        self.loop.submit(list(sequences))
        if not self.loop._thread.is_alive():
            self.loop.start()
        self.wait_ended(*sequences)

    def wait_ended(self, *sequences: Sequence) -> None:
        """Wait for the end of all."""
        names = {sequence.request_id for sequence in sequences}
        self.wait_for(
            lambda: names <= {n for step in self.steps for n, length in step if length == ENDED}
        )


class Served:
    """A toy engine behind HTTP in a thread."""

    def __init__(
        self, config: EmbeddedConfig, spec: EngineSpec, setup: ModelSetup, receiver: Receiver | None
    ) -> None:
        self.spec = spec
        self.setup = setup
        self.error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run, args=(config, spec, setup, receiver), daemon=True
        )
        self._thread.start()
        for _ in range(2000):
            if spec.url_file.exists():
                break
            self._thread.join(0.01)
            assert self._thread.is_alive(), self.error
        self.url = spec.url_file.read_text().strip()
        self.client = httpx.Client(base_url=self.url, timeout=30, trust_env=False)

    def _run(self, *arguments: Any) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(serve_model(*arguments))
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.error = error

    def generate(self, token_ids: list[int], **sampling: Any) -> dict[str, Any]:
        """One answer of /inference/v1/generate."""
        body = {"token_ids": token_ids, "sampling_params": sampling}
        answer = self.client.post("/inference/v1/generate", json=body)
        assert answer.status_code == 200, answer.text
        result: dict[str, Any] = answer.json()
        return result

    def close(self) -> None:
        """End the server as a signal would."""
        self.client.close()
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def drive(tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    """Makes drivers: drive(cached=True, tie_word_embeddings=False, **engine settings)."""
    drivers: list[Driver] = []

    def make(cached: bool = True, tie_word_embeddings: bool = False, **settings: Any) -> Driver:
        plugin = ToyModel if cached else ToyModelWithoutDecoder
        directory = tmp_path / f"toy_{len(drivers)}"
        setup = toy_setup(directory, 0, plugin, tie_word_embeddings=tie_word_embeddings)
        drivers.append(Driver(setup, **settings))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.loop.stop()


@pytest.fixture
def serve_toy(tmp_path: Path) -> Iterator[Callable[..., Served]]:
    """Starts toy servers: serve_toy(receiver=None, settings={}, setup=None, **spec changes)."""
    servers: list[Served] = []

    def start(
        receiver: Receiver | None = None,
        settings: dict[str, Any] | None = None,
        setup: ModelSetup | None = None,
        **changes: Any,
    ) -> Served:
        setup = setup or toy_setup(tmp_path / "toy", 0)
        spec = toy_spec(setup, tmp_path / f"engine_{len(servers)}.url", **changes)
        servers.append(Served(EmbeddedConfig(**settings or {}), spec, setup, receiver))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def make_toy() -> Callable[..., ModelSetup]:
    """Makes toy checkpoints: make_toy(directory, seed)."""
    return toy_setup


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One toy server for tests that only ask."""
    directory = tmp_path_factory.mktemp("toy")
    setup = toy_setup(directory, 0)
    spec = toy_spec(
        setup, directory / "engine.url", return_routed_experts=True, return_sampling_mask=True
    )
    server = Served(EmbeddedConfig(), spec, setup, None)
    yield server
    server.close()
