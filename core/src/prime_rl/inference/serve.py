"""Puts an embedded engine together from its spec, and runs its HTTP server until told to end."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import random
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import uvicorn

from prime_rl.api.engine import EngineSpec
from prime_rl.api.transport import Receiver
from prime_rl.errors import RunError
from prime_rl.inference.admission import Limits, stop_tokens_of
from prime_rl.inference.embedded import EmbeddedConfig
from prime_rl.inference.engine_loop import EngineLoop, Progress
from prime_rl.inference.runner import ModelRunner
from prime_rl.inference.server import build_application
from prime_rl.inference.service import EngineService
from prime_rl.inference.text import TextTokenizer
from prime_rl.inference.weights import WeightUpdater
from prime_rl.models.load import load_weights
from prime_rl.models.setup import ModelSetup, build, prepare
from prime_rl.plugins import Registry, scan

logger = logging.getLogger(__name__)

SHUTDOWN_S = 2
"""Requests in flight get this long after the signal to end."""


def serve(config: EmbeddedConfig, spec: EngineSpec) -> None:
    """Load the model, answer requests, return after SIGTERM or SIGINT."""
    spec.url_file.unlink(missing_ok=True)
    torch.set_num_threads(spec.threads)
    registry = scan()
    setup = prepare(spec.model_section, spec.model_dir, registry)
    asyncio.run(serve_model(config, spec, setup, _receiver(spec, registry)))


def load_runner(config: EmbeddedConfig, spec: EngineSpec, setup: ModelSetup) -> ModelRunner:
    """The model with its weights on the engine's device."""
    dtype = getattr(torch, spec.compute_dtype)
    module = build(setup, device="meta", dtype=dtype)
    load_weights(module, setup.layout, spec.model_dir, device_of(spec))
    module.eval().requires_grad_(False)
    return ModelRunner(
        setup.plugin,
        setup.architecture,
        module,
        setup.layout,
        max_running=config.max_running,
        max_model_len=spec.max_model_len,
        max_batch_tokens=config.max_batch_tokens,
        use_decode_cache=config.use_decode_cache,
        records_routes=spec.return_routed_experts,
    )


def device_of(spec: EngineSpec) -> torch.device:
    """The engine's own device: with several accelerators, engines take them from the last one
    down, and the trainer's ranks from the first one up."""
    if spec.device != "cuda":
        return torch.device(spec.device)
    found = torch.cuda.device_count()
    return torch.device("cuda", (found - 1 - spec.index) % found)


def limits_of(spec: EngineSpec, setup: ModelSetup) -> Limits:
    """What requests may ask of this engine."""
    experts = setup.config_json
    count = max(
        int(experts.get(name) or 0)
        for name in ("num_experts", "n_routed_experts", "num_local_experts")
    )
    return Limits(
        served_names=(spec.served_name, str(spec.model_dir)),
        vocab_size=setup.architecture.vocab_size,
        max_model_len=spec.max_model_len,
        stop_token_ids=frozenset(
            token
            for token in stop_tokens_of(spec.model_dir)
            if token < setup.architecture.vocab_size
        ),
        returns_kept=spec.return_sampling_mask,
        returns_routes=spec.return_routed_experts,
        seeds=random.Random(f"{spec.seed}/{spec.index}"),
        experts_dtype="uint8" if 0 < count <= 255 else "uint16",
    )


def _receiver(spec: EngineSpec, registry: Registry) -> Receiver | None:
    section = spec.weight_transport
    if section is None:
        return None
    transport = registry.load("weight_transport", section.type)(section)
    receiver: Receiver = transport.receiver(spec.index, spec.count)
    return receiver


def build_service(
    config: EmbeddedConfig, spec: EngineSpec, setup: ModelSetup, receiver: Receiver | None
) -> EngineService:
    """The engine, not started, whose results go to the running event loop."""
    event_loop = asyncio.get_running_loop()

    def deliver(progress: list[Progress]) -> None:
        if not event_loop.is_closed():
            event_loop.call_soon_threadsafe(EngineService.dispatch, progress)

    engine = EngineLoop(
        load_runner(config, spec, setup),
        max_running=config.max_running,
        max_queue=config.max_queue,
        max_batch_tokens=config.max_batch_tokens,
        max_model_len=spec.max_model_len,
        deliver=deliver,
    )
    return EngineService(
        engine,
        limits_of(spec, setup),
        TextTokenizer(spec.model_dir, getattr(spec.model_section, "trust_remote_code", False)),
        WeightUpdater(engine, receiver),
        config.max_body_mib * 2**20,
    )


async def serve_model(
    config: EmbeddedConfig, spec: EngineSpec, setup: ModelSetup, receiver: Receiver | None
) -> None:
    """Serve a prepared model until a signal comes or the task is cancelled. Raises RunError."""
    listener = _listen(spec.host, spec.port)
    service = build_service(config, spec, setup, receiver)
    engine = service.loop
    server = QuietServer(
        uvicorn.Config(
            build_application(service),
            access_log=False,
            log_config=None,
            lifespan="off",
            timeout_graceful_shutdown=SHUTDOWN_S,
            timeout_keep_alive=75,
        )
    )
    engine.start()
    announcer = asyncio.create_task(_announce(server, listener, spec))
    watcher = asyncio.create_task(_end_together(server, engine))
    try:
        await server.serve(sockets=[listener])
    finally:
        announcer.cancel()
        watcher.cancel()
        failure = None if engine.is_stopping else engine.failure
        engine.stop()
        listener.close()
        if receiver is not None:
            receiver.close()
    if failure is not None:
        raise RunError(f"engine {spec.index} failed: {failure}")


def _listen(host: str, port: int) -> socket.socket:
    """A bound socket; warns when others can reach it."""
    try:
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    if not is_loopback:
        logger.warning(
            "THE ENGINE LISTENS ON %s: whoever can reach this address can generate, replace the "
            "weights and read files through it. It has no authentication; bind 127.0.0.1 instead.",
            host,
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle off only for sockets that say TCP; with it, answers wait 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise RunError(
            f"the engine cannot listen on {host} port {port}: {error.strerror}; choose another "
            "inference.port, or 0 to let the system choose"
        ) from error
    listener.set_inheritable(False)
    return listener


async def _announce(server: uvicorn.Server, listener: socket.socket, spec: EngineSpec) -> None:
    """Write the URL once requests are answered."""
    while not server.started:
        await asyncio.sleep(0.005)
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    write_line(spec.url_file, url)
    logger.info("engine %d serves %s at %s", spec.index, spec.served_name, url)


def write_line(path: Path, text: str) -> None:
    """Write one line so that a reader sees all of it or no file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.rename(path)


async def _end_together(server: uvicorn.Server, engine: EngineLoop) -> None:
    """A server without an engine must not live on; a server that is told to end answers whoever
    waits for the engine at once."""
    while engine.failure is None and not server.should_exit:
        await asyncio.sleep(0.05)
    server.should_exit = True
    await asyncio.to_thread(engine.stop)


class QuietServer(uvicorn.Server):
    """Ends on SIGTERM and SIGINT by returning, so that what it holds is closed in order. (uvicorn's
    own way is to raise the signal again once it has shut down.)"""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install the handlers, in the main thread only."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
