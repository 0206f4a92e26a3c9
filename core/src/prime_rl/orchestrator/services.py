"""Everything around the loop: engines, router, environments. Found or started, and closed again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from prime_rl.api import Model
from prime_rl.configs.orchestrator import SourceConfig
from prime_rl.configs.paths import StagePaths, stage_model_dir, stage_paths
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.control.engines import EngineAdmin
from prime_rl.models.choose import make_plugin, read_config_json
from prime_rl.orchestrator.contexts import ContextRenderer
from prime_rl.orchestrator.discovery import publish, read_when_there
from prime_rl.orchestrator.env_client import EnvironmentClient
from prime_rl.orchestrator.episode import Split
from prime_rl.orchestrator.frozen import FrozenSource
from prime_rl.orchestrator.group import ViewOfContext
from prime_rl.orchestrator.pack import CostOfRow
from prime_rl.orchestrator.router_host import RouterHost
from prime_rl.orchestrator.runner import LoadedSource
from prime_rl.orchestrator.sampling import client_settings
from prime_rl.orchestrator.sessions import RemoteSessions
from prime_rl.orchestrator.tasks import read_tasks, tasks_file
from prime_rl.plugins import Registry

log = logging.getLogger(__name__)

START_TIMEOUT_S = 600.0
"""How long engines and environment servers may take to start."""


@dataclass(frozen=True)
class Services:
    """What the loop works with."""

    engines: EngineAdmin
    router_url: str
    model: str
    """Name under which the engines serve."""
    sources: dict[tuple[Split, str], LoadedSource]
    release_sessions: Callable[[Sequence[str]], None]
    check: Callable[[], None]
    """Raises RunError when something hosted here has ended."""
    cost: CostOfRow
    view: ViewOfContext | None = None
    """Renders what is shown to a reference before a branch."""
    vocabulary: int | None = None
    """Size of the model's; None: unknown."""


def wanted_sources(
    stage: RLConfig | SFTConfig, evaluate_only: bool
) -> list[tuple[Split, SourceConfig]]:
    """The sources of a stage, by split."""
    found: list[tuple[Split, SourceConfig]] = []
    if isinstance(stage, RLConfig):
        if not evaluate_only:
            found += [("train", source) for source in stage.orchestrator.train.source]
        evaluated = stage.orchestrator.eval
    else:
        evaluated = stage.eval
    if evaluated is not None:
        found += [("eval", source) for source in evaluated.source]
    return found


async def open_services(
    run: RunConfig,
    index: int,
    registry: Registry,
    stack: AsyncExitStack,
    evaluate_only: bool,
    frozen: Mapping[str, FrozenSource] | None = None,
) -> Services:
    """Wait for the stage's processes and connect; `stack` closes everything again. `frozen` are the
    training sources that a frozen model plays.

    Raises RunError when a process does not come up.
    """
    stage = run.stages[index]
    paths = stage_paths(run, index)
    sources = wanted_sources(stage, evaluate_only)
    urls = await _engine_urls(stage, paths)
    engines = await stack.enter_async_context(EngineAdmin(urls))
    await engines.wait_ready(START_TIMEOUT_S)
    router_url, release, check = _open_router(stage, urls, registry, stack)
    publish(paths.router_url, router_url)
    model_dir = stage_model_dir(run, index)
    plugin = make_plugin(stage.model, read_config_json(model_dir), registry)
    tokenizer = Path(stage.tokenizer.name) if stage.tokenizer.name else model_dir
    renderer = plugin.renderer if stage.tokenizer.renderer == "auto" else stage.tokenizer.renderer
    settings = client_settings(router_url, tokenizer, renderer)
    connected = {}
    for split, source in sources:
        player = (frozen or {}).get(source.label) if split == "train" else None
        own = settings if player is None else player.client_settings(tokenizer, renderer)
        loaded = await _connect(paths, split, source, own, stack)
        connected[split, source.label] = (
            loaded if player is None else replace(loaded, frozen_model=player.name)
        )
    return Services(
        engines=engines,
        router_url=router_url,
        model=await engines.served_name(),
        sources=connected,
        release_sessions=release,
        check=check,
        cost=row_cost(plugin, model_dir),
        view=ContextRenderer(tokenizer, renderer).view,
        vocabulary=plugin.architecture(read_config_json(model_dir)).vocab_size,
    )


async def _engine_urls(stage: RLConfig | SFTConfig, paths: StagePaths) -> list[str]:
    if stage.inference.base_url is not None:
        return [stage.inference.base_url]
    return [
        await read_when_there(paths.engine_url(number), f"engine {number}", START_TIMEOUT_S)
        for number in range(stage.inference.replicas)
    ]


def _open_router(
    stage: RLConfig | SFTConfig, urls: Sequence[str], registry: Registry, stack: AsyncExitStack
) -> tuple[str, Callable[[Sequence[str]], None], Callable[[], None]]:
    """URL for episodes, how to release sessions there, and a check that it still runs."""
    if stage.inference.base_url is not None:
        remote = RemoteSessions(stage.inference.base_url)
        stack.push_async_callback(remote.close)
        return stage.inference.base_url, remote.finish, lambda: None
    router = registry.load("router", stage.router.type)(stage.router)
    host = RouterHost(router.application(urls))
    stack.callback(host.stop)
    host.start()
    log.info("router at %s in front of %d engine(s)", host.url, len(urls))
    return host.url, host.finish_sessions, host.check


async def _connect(
    paths: StagePaths,
    split: Split,
    source: SourceConfig,
    settings: dict[str, object],
    stack: AsyncExitStack,
) -> LoadedSource:
    address_file = paths.environment_address(split, source.label)
    meaning = f"the {split} environment server of {source.label!r}"
    address = await read_when_there(address_file, meaning, START_TIMEOUT_S)
    client = EnvironmentClient(address, settings)
    stack.push_async_callback(client.close)
    tasks = await asyncio.to_thread(read_tasks, tasks_file(address_file))
    await client.wait_healthy(START_TIMEOUT_S)
    return LoadedSource(source, tasks, client)


def row_cost(plugin: Model, model_dir: Path) -> CostOfRow:
    """Operations of a packed row, from the model's own count."""
    architecture = plugin.architecture(read_config_json(model_dir))
    return lambda lengths: plugin.flops(architecture, lengths)
