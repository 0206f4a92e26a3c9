"""Entry of the orchestrator process: set up, run the loop or one evaluation, close in order."""

from __future__ import annotations

import asyncio
import logging
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from prime_rl.api.algorithm import Algorithm
from prime_rl.batches import open_batch_server
from prime_rl.configs.paths import StagePaths, stage_paths
from prime_rl.configs.run import RLConfig, RunConfig
from prime_rl.errors import CheckpointError, ConfigError
from prime_rl.orchestrator.frozen import find_teachers, frozen_sources
from prime_rl.orchestrator.loop import Orchestrator
from prime_rl.orchestrator.recorder import Recorder
from prime_rl.orchestrator.reference import open_references
from prime_rl.orchestrator.services import open_services
from prime_rl.orchestrator.standalone import StandaloneEvaluation
from prime_rl.orchestrator.state import OrchestratorState
from prime_rl.plugins import Registry, scan
from prime_rl.plugins.hooks import load_hooks

log = logging.getLogger(__name__)

EXIT_TERMINATED = 143


def run_orchestrator(run: RunConfig, stage: int, evaluate_step: int | None = None) -> None:
    """Run the orchestrator of an RL stage; with `evaluate_step`, evaluate the engines' weights once
    instead and write the rows under that step.

    Raises PrimeError when the run cannot go on, SystemExit(143) after SIGTERM.
    """
    switches = run.stages[stage].plugins  # a listener that the run denies must not be imported
    registry = scan().with_switches(allow=switches.allow, deny=switches.deny)
    registry.verify_table(run.plugin_versions)
    if evaluate_step is None and not isinstance(run.stages[stage], RLConfig):
        raise ConfigError(f"stage {stage} is no RL stage; the orchestrator can only evaluate it")
    asyncio.run(_run(run, stage, registry, evaluate_step))


async def _run(run: RunConfig, index: int, registry: Registry, evaluate_step: int | None) -> None:
    work = asyncio.current_task()
    assert work is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, work.cancel)
    try:
        if evaluate_step is None:
            await _train(run, index, registry)
        else:
            await _evaluate(run, index, registry, evaluate_step)
    except asyncio.CancelledError:
        log.info("told to end")
        raise SystemExit(EXIT_TERMINATED) from None


async def _evaluate(run: RunConfig, index: int, registry: Registry, step: int) -> None:
    stage = run.stages[index]
    async with AsyncExitStack() as stack:
        recorder = Recorder(stage_paths(run, index), True, load_hooks(registry))
        stack.callback(recorder.close)
        services = await open_services(run, index, registry, stack, evaluate_only=True)
        await StandaloneEvaluation(stage, services, recorder, step).run()


async def _train(run: RunConfig, index: int, registry: Registry) -> None:
    stage = run.stages[index]
    assert isinstance(stage, RLConfig)
    paths = stage_paths(run, index)
    resumed_after, state = _read_state(stage, paths)
    batches = open_batch_server(
        stage.orchestrator.batch_transport, paths, stage.trainer.parallel.ranks
    )
    hooks = load_hooks(registry)
    reason = ""
    try:
        async with AsyncExitStack() as stack:
            recorder = Recorder(paths, stage.orchestrator.save_episodes, hooks)
            stack.callback(recorder.close)
            algorithms = _algorithms(stage, registry)
            teachers = await find_teachers(algorithms)
            frozen = frozen_sources(algorithms, teachers)
            services = await open_services(
                run, index, registry, stack, evaluate_only=False, frozen=frozen
            )
            config = stage.orchestrator
            references = await open_references(
                algorithms, teachers, services, stack, config.max_empty_batches * config.batch_size
            )
            transport: Any = registry.load("weight_transport", stage.weight_broadcast.type)
            orchestrator = Orchestrator(
                stage=stage,
                paths=paths,
                services=services,
                batches=batches,
                recorder=recorder,
                algorithms=algorithms,
                references=references,
                pauses_engines=bool(transport.capabilities.get("pauses_engines", True)),
                resumed_after=resumed_after,
                state=state,
            )
            hooks.tell("run_started", run_dir=run.directory, role="orchestrator")
            await orchestrator.run()
            hooks.tell("run_finished", run_dir=run.directory, role="orchestrator", exit_code=0)
            log.info("finished after step %d", stage.max_steps)
    except Exception as error:
        reason = f"the orchestrator failed: {error}"
        raise
    finally:
        batches.close(reason)


def _algorithms(stage: RLConfig, registry: Registry) -> dict[str, Algorithm]:
    """One instance per training source: their states stay apart.

    Raises ConfigError when their ways of averaging differ: the loss has one denominator.
    """
    made: dict[str, Algorithm] = {}
    for source in stage.orchestrator.train.source:
        section = source.algo or stage.orchestrator.train.algo
        made[source.label] = registry.load("algorithm", section.type)(section)
    ways = {
        label: each.requirements.loss_aggregation
        for label, each in made.items()
        if "rl" in each.requirements.components
    }
    if len(set(ways.values())) > 1:
        listed = ", ".join(f"{label}: {way}" for label, way in ways.items())
        raise ConfigError(f"all sources must use the same loss_aggregation, found {listed}")
    return made


def _read_state(stage: RLConfig, paths: StagePaths) -> tuple[int, OrchestratorState | None]:
    """Step to continue after (0: a fresh start), and the state to continue from."""
    resume = stage.resume
    if resume is None:
        return 0, None
    if resume.dir is not None:
        folder: Path = resume.dir
    elif resume.step is not None:
        folder = paths.checkpoint(resume.step)
    else:
        raise CheckpointError("resume names no step; it is chosen when the run is launched")
    step = int(folder.name.removeprefix("step_"))
    if resume.skip_dataloader:
        return step, None
    return step, OrchestratorState.read(folder / "orchestrator")
