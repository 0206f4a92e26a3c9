"""Entry of the trainer process: one rank of one stage of a resolved run."""

from __future__ import annotations

import logging

from prime_rl.configs.run import RLConfig, RunConfig
from prime_rl.parallel.world import start_world, stop_world
from prime_rl.plugins import scan
from prime_rl.plugins.hooks import load_hooks

log = logging.getLogger(__name__)


def run_trainer(run: RunConfig, stage: int) -> None:
    """Train stage `stage` of a resolved run; returns when its last step is done and exported.

    Under torchrun every rank calls this. Raises PrimeError with a message for the user.
    """
    config = run.stages[stage]
    parallel = config.trainer.parallel
    control_timeout_s = parallel.timeout_s
    if isinstance(config, RLConfig):
        control_timeout_s = 2 * config.weight_broadcast_timeout_s
    world = start_world(
        config.trainer.device, parallel.timeout_s, control_timeout_s, parallel.ranks
    )
    try:
        switches = config.plugins  # a listener that the run denies must not be imported here
        registry = scan().with_switches(allow=switches.allow, deny=switches.deny)
        registry.verify_table(run.plugin_versions)
        hooks = load_hooks(registry)
        from prime_rl.trainer.rl import RLTraining
        from prime_rl.trainer.sft import SFTTraining

        training_class = RLTraining if isinstance(config, RLConfig) else SFTTraining
        training = training_class(run, stage, world, registry, hooks)
        if world.is_master:
            hooks.tell("run_started", run_dir=run.directory, role="trainer")
        training.run()
        if world.is_master:
            hooks.tell("run_finished", run_dir=run.directory, role="trainer", exit_code=0)
    finally:
        stop_world()
