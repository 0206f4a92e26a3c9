"""`prime env-server`: the environment server of one source, from a resolved run."""

from __future__ import annotations

from prime_rl.cli.component import component_parser, start_component


def command(arguments: list[str]) -> int:
    """Serve until told to end."""
    parser = component_parser("env-server", "Serve the environment of one source of a run.")
    parser.add_argument("--split", choices=("train", "eval"), required=True)
    parser.add_argument("--source", required=True, metavar="LABEL", help="name of the source")
    options = parser.parse_args(arguments)
    run = start_component(options, f"env_{options.split}_{options.source}")
    from prime_rl.orchestrator.env_server import run_env_server

    run_env_server(run, options.stage, options.split, options.source)
    return 0
