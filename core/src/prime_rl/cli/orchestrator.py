"""`prime orchestrator`: the orchestrator of one stage, or one evaluation, from a resolved run."""

from __future__ import annotations

import argparse
from pathlib import Path


def command(arguments: list[str]) -> int:
    """Run until the stage is over."""
    parser = argparse.ArgumentParser(
        "prime orchestrator", description="Run the orchestrator of one stage of a run."
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="RUN.JSON", help="the resolved run"
    )
    parser.add_argument("--stage", type=int, default=0, metavar="K", help="stage number, from 0")
    parser.add_argument(
        "--evaluate-step",
        type=int,
        metavar="N",
        help="evaluate what the engines serve once, as step N, and end",
    )
    options = parser.parse_args(arguments)

    from prime_rl.configs.load import load_resolved
    from prime_rl.control.lifetime import end_with_parent
    from prime_rl.control.logs import setup_logging
    from prime_rl.errors import ConfigError
    from prime_rl.plugins import scan

    end_with_parent()
    run = load_resolved(options.config, scan())
    if not 0 <= options.stage < len(run.stages):
        raise ConfigError(
            f"--stage {options.stage}: the run has {len(run.stages)} stages, counted from 0"
        )
    setup_logging("orchestrator", run.stages[options.stage].log.level)
    from prime_rl.orchestrator.main import run_orchestrator

    run_orchestrator(run, options.stage, options.evaluate_step)
    return 0
