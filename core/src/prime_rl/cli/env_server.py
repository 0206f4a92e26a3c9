"""`prime env-server`: the environment server of one source, from a resolved run."""

from __future__ import annotations

import argparse
from pathlib import Path


def command(arguments: list[str]) -> int:
    """Serve until told to end."""
    parser = argparse.ArgumentParser(
        "prime env-server", description="Serve the environment of one source of a run."
    )
    parser.add_argument(
        "--config", type=Path, required=True, metavar="RUN.JSON", help="the resolved run"
    )
    parser.add_argument("--stage", type=int, default=0, metavar="K", help="stage number, from 0")
    parser.add_argument("--split", choices=("train", "eval"), required=True)
    parser.add_argument("--source", required=True, metavar="LABEL", help="name of the source")
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
    setup_logging(f"env_{options.split}_{options.source}", run.stages[options.stage].log.level)
    from prime_rl.orchestrator.env_server import run_env_server

    run_env_server(run, options.stage, options.split, options.source)
    return 0
