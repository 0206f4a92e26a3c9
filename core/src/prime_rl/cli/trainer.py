"""`prime trainer`: one trainer process, from a resolved run."""

from __future__ import annotations

from prime_rl.cli.component import component_parser, start_component


def command(arguments: list[str]) -> int:
    """Train one stage; under torchrun, as one of its ranks."""
    options = component_parser("trainer", "Train one stage of a run.").parse_args(arguments)
    run = start_component(options, "trainer")
    from prime_rl.trainer.main import run_trainer

    run_trainer(run, options.stage)
    return 0
