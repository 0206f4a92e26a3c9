"""`prime orchestrator`: the orchestrator of one stage, or one evaluation, from a resolved run."""

from __future__ import annotations

from prime_rl.cli.component import component_parser, start_component


def command(arguments: list[str]) -> int:
    """Run until the stage is over."""
    parser = component_parser("orchestrator", "Run the orchestrator of one stage of a run.")
    parser.add_argument(
        "--evaluate-step",
        type=int,
        metavar="N",
        help="evaluate what the engines serve once, as step N, and end",
    )
    options = parser.parse_args(arguments)
    run = start_component(options, "orchestrator")
    from prime_rl.orchestrator.main import run_orchestrator

    run_orchestrator(run, options.stage, options.evaluate_step)
    return 0
