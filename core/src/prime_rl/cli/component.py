"""What the commands that start one component of a run share: its arguments, its start."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prime_rl.configs.run import RunConfig


def component_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser with the arguments every component takes."""
    parser = argparse.ArgumentParser(f"prime {command}", description=description)
    parser.add_argument(
        "--config", type=Path, required=True, metavar="RUN.JSON", help="the resolved run"
    )
    parser.add_argument("--stage", type=int, default=0, metavar="K", help="stage number, from 0")
    return parser


def start_component(options: argparse.Namespace, process: str) -> RunConfig:
    """Tie this process to the launcher that started it, read the run, set up logging.

    Raises ConfigError when the run does not have the stage.
    """
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
    setup_logging(process, run.stages[options.stage].log.level)
    return run
