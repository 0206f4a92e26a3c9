"""`prime run`: resolve a recipe, check it, run its stages, show what came out."""

from __future__ import annotations

import logging
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from prime_rl.cli.report import draw_report, results_table
from prime_rl.configs.load import LoadedRun, load_run, save_resolved
from prime_rl.configs.paths import RunPaths, StagePaths
from prime_rl.configs.run import RLConfig, RunConfig, SFTConfig
from prime_rl.launch.attempts import prepare_attempt
from prime_rl.launch.checks import check_run
from prime_rl.launch.sequence import Sequence, resolve_resume
from prime_rl.plugins import scan
from prime_rl.plugins.hooks import load_hooks

if TYPE_CHECKING:
    from prime_rl.cli.live import StageView

logger = logging.getLogger(__name__)

USAGE = """\
Usage: prime run [RECIPE | @ FILE ...] [--plugin NAME] [--section.key VALUE ...] [OPTIONS]

RECIPE is a TOML file, an installed recipe (`plugin:recipe`, or a name that only one plugin has), or
nothing: then --plugin's debug recipe, or the installed `quickstart`.

Options:
  --plugin NAME      use this plugin for its kind; a model without a recipe runs its debug recipe
  --no-plugin NAME   never use this plugin
  --dry-run          resolve, check and write the configuration; start nothing
  --resume [STEP]    continue the run in its directory
  --clean            delete what the run directory holds
  --stages.N.x, --sft.x, --rl.x set a field of one stage; --x sets it in every stage
"""


def command(arguments: list[str]) -> int:
    """Run a recipe; `--help` shows every field."""
    console = Console(highlight=False)
    loaded = load_run(arguments, scan())
    for warning in loaded.warnings:
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    if loaded.arguments.help:
        from prime_rl.configs.help import field_help

        print(f"{USAGE}\n{field_help(loaded.run, loaded.registry)}")
        return 0
    return _run(loaded, console)


def _run(loaded: LoadedRun, console: Console) -> int:
    run, arguments = loaded.run, loaded.arguments
    assert run is not None
    logging.basicConfig(level="INFO", format="%(message)s", force=True)
    for warning in check_run(run, loaded.registry, arguments.dry_run):
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    from prime_rl.cli.sources import check_sources

    is_resumed = arguments.resume is not None
    for warning in check_sources(
        run, loaded.registry, is_resumed=is_resumed, dry_run=arguments.dry_run
    ):
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)
    started = time.monotonic()
    attempt = prepare_attempt(run, arguments, loaded.inputs)
    if arguments.resume is not None:
        run = resolve_resume(run)
    resolved = RunPaths(run.directory).resolved(attempt)
    save_resolved(run, resolved)
    if arguments.dry_run:
        console.print(f"resolved configuration: {resolved}", soft_wrap=True)
        return 0
    _make_fresh_model(run, loaded)
    hooks = load_hooks(loaded.registry)
    hooks.tell("resolved_config", config=run.model_dump(mode="json"), run_dir=run.directory)

    def view(
        title: str, stage: SFTConfig | RLConfig, paths: StagePaths
    ) -> AbstractContextManager[StageView]:
        from prime_rl.cli.live import StageView

        return StageView(console, title, stage, paths)

    hooks.tell("run_started", run_dir=run.directory, role="launcher")
    code = Sequence(run, attempt, loaded.registry, view).run()
    hooks.tell("run_finished", run_dir=run.directory, role="launcher", exit_code=code)
    if code == 0:
        _show_results(run, console, time.monotonic() - started)
    else:
        console.print(
            f"The run ended with exit code {code}. Logs: {RunPaths(run.directory).logs / 'latest'}\n"
            "Continue it with the same command and --resume.",
            soft_wrap=True,
            markup=False,
        )
    return code


def _make_fresh_model(run: RunConfig, loaded: LoadedRun) -> None:
    """Make the model with random weights once; a resumed run finds it there."""
    stage = run.stages[0]
    target = RunPaths(run.directory).fresh_model
    if stage.model.fresh is None or (target / "config.json").is_file():
        return
    from prime_rl.models.fresh import make_fresh_model

    make_fresh_model(stage.model.fresh, stage.model, target, loaded.registry)


def _show_results(run: RunConfig, console: Console, seconds: float) -> None:
    table = results_table(run)
    if table is not None:
        console.print(table)
    picture: Path = run.directory / "report.png"
    draw_report(run, picture)
    console.print(
        f"Finished in {seconds:.0f} s. Run directory: {run.directory}\n"
        f"Curves: {picture}\n"
        "Next: try another setting, e.g. `prime run quickstart --run.name second --seed 1`; "
        "`prime run --help` lists every field;\n"
        "or write a loss of your own with `prime plugins new loss NAME`.",
        soft_wrap=True,
        markup=False,
    )
