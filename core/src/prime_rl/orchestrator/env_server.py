"""Entry of an environment server process: the `verifiers` server of one source."""

from __future__ import annotations

import functools
import gc
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prime_rl.configs.orchestrator import SourceConfig
from prime_rl.configs.paths import stage_model_dir, stage_paths
from prime_rl.configs.run import RLConfig, RunConfig
from prime_rl.control.logs import setup_logging
from prime_rl.errors import ConfigError
from prime_rl.models.choose import make_plugin, read_config_json
from prime_rl.models.renderers import load_renderer
from prime_rl.orchestrator.discovery import publish
from prime_rl.orchestrator.pydantic_default_factories import remember_signatures
from prime_rl.orchestrator.services import wanted_sources
from prime_rl.orchestrator.tasks import (
    environment_settings,
    load_tasks,
    tasks_file,
    write_tasks,
)
from prime_rl.plugins import scan

log = logging.getLogger(__name__)


class AddressFile:
    """Takes the address the server bound and publishes it; shaped like the queue it expects."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def put(self, address: str) -> None:
        """The server listens at `address`."""
        publish(self._path, address)


def find_source(stage: object, split: str, label: str) -> SourceConfig:
    """The source called `label`. Raises ConfigError naming those there are."""
    known = [source for found, source in wanted_sources(stage, False) if found == split]  # type: ignore[arg-type]
    for source in known:
        if source.label == label:
            return source
    names = ", ".join(source.label for source in known) or "none"
    raise ConfigError(f"there is no {split} source {label!r}; sources: {names}")


def run_env_server(run: RunConfig, stage: int, split: str, label: str) -> None:
    """Serve until SIGTERM. Tasks and address appear in the stage's runtime folder.

    Raises ConfigError when the source cannot be loaded.
    """
    from verifiers.v1.utils.loaders import resolve_env_config

    config = run.stages[stage]
    source = find_source(config, split, label)
    workers = config.orchestrator.env_workers if isinstance(config, RLConfig) else 1
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    address_path = stage_paths(run, stage).environment_address(split, label)
    address_file = AddressFile(address_path)
    log_setup = functools.partial(set_up_logging, f"env_{split}_{label}", config.log.level)
    log_setup()
    tasks = load_tasks(source)
    environment = resolve_env_config(environment_settings(source))
    write_tasks(tasks_file(address_path), tasks)
    log.info("serving %s: %d tasks, %d worker(s)", label, len(tasks), workers)
    if workers > 1:
        _serve_pool(environment, workers, address_file, log_setup)
    else:
        _warm_up(run, stage)
        _serve_alone(environment, address_file)


def set_up_logging(process: str, level: str) -> None:
    """A line for every request and every episode is left out: those are in the trace stream, and
    writing them costs more than the smallest episodes do."""
    setup_logging(process, level)
    if level != "debug":
        for name in ("aiohttp.access", "verifiers"):
            logging.getLogger(name).setLevel(logging.WARNING)


def _serve_alone(environment: Any, address_file: AddressFile) -> None:
    from prime_rl.orchestrator.episode_server import EpisodeServer

    remember_signatures()
    signal.signal(signal.SIGTERM, _interrupt)
    server = EpisodeServer(environment, address="tcp://127.0.0.1:0")
    address_file.put(server.address)
    server.serve()


def _interrupt(*_: object) -> None:
    """The event loop must leave its contexts: they hold folders and connections of episodes."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _serve_pool(
    environment: Any, workers: int, address_file: AddressFile, log_setup: Callable[[], None]
) -> None:
    """The library's own pool: a broker here, one process per worker."""
    from verifiers.v1.serve.pool import serve_env

    serve_env(
        max_workers=workers,
        elastic=False,
        config=environment,
        address="tcp://127.0.0.1:0",
        address_queue=address_file,
        log_setup=log_setup,
    )


def _warm_up(run: RunConfig, stage: int) -> None:
    """Import what the first episode would import, then keep it out of the garbage collector: a
    full collection over the libraries' own objects takes longer than an episode."""
    config = run.stages[stage]
    model_dir = stage_model_dir(run, stage)
    renderer = config.tokenizer.renderer
    if renderer == "auto":
        registry = scan()
        renderer = make_plugin(config.model, read_config_json(model_dir), registry).renderer
    load_renderer(Path(config.tokenizer.name or model_dir), renderer)
    gc.collect()
    gc.freeze()
