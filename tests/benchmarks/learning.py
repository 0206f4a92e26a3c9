"""Does every loss and every algorithm learn? Short runs with all processes real, three seeds each.

For each seed the recipes are fine-tuned once; every case trains on from there with RL, and its reward on
held-out tasks is read before and after. `opd` and `sft` learn from a better model that is served beside
the run. Some rows have a second measure, in nats per token over the first and the last quarter of the
steps: the reverse KL from the teacher (`opd`, `opsd`), the forward KL (`sft`: cross-entropy less the
entropy of the teacher's own tokens), the cross-entropy of the tool's answers (`echo`). What was run
already in the folder is not run again.

Run: python tests/benchmarks/learning.py FOLDER [--seeds 3] [--cases echo,rae]    about 70 minutes
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

import tomli_w

from prime_rl.testing.served_engine import serve_engine

RECIPES = files("prime_rl_model_qwen3") / "recipes"
TEACHER_STEPS = 150
"""Steps of fine-tuning of a teacher; its pupils had 45."""
QUARTERS = 4


class Case(NamedTuple):
    """One row of the table."""

    recipe: str
    settings: Sequence[str] = ()
    has_teacher: bool = False
    start_steps: int | None = None
    """Steps of fine-tuning where the recipe's own leave little to learn."""


TOOLS = ["--max-steps", "40", "--orchestrator.eval.source.0.env.taskset.num-tasks", "256"]
CASES = {
    "ipo, grpo": Case("quickstart"),
    "icepop, grpo": Case("quickstart", ["--trainer.loss", "icepop"]),
    "ppo, grpo": Case("quickstart", ["--trainer.loss", "ppo"]),
    "cispo, grpo": Case("quickstart", ["--trainer.loss", "cispo"]),
    "ipo, max_rl": Case("quickstart", ["--orchestrator.train.algo", "max_rl"]),
    "ipo, rae": Case("duel"),
    "ipo, hierarchical_grpo": Case("proposer"),
    "ipo, grpo with tools": Case("tools", TOOLS, start_steps=90),
    "ipo, echo": Case(
        "tools",
        [
            *TOOLS,
            *("--orchestrator.train.algo", "echo", "--orchestrator.train.algo.alpha.tool", "0.003"),
        ],
        start_steps=90,
    ),
    "opd": Case("quickstart", ["--orchestrator.train.algo", "opd"], has_teacher=True),
    "opsd": Case("opsd"),
    "sft": Case("quickstart", ["--orchestrator.train.algo", "sft"], has_teacher=True),
}


class Outcome(NamedTuple):
    """What one run came to."""

    before: float
    after: float
    seconds: float
    nats: tuple[float, float] | None
    """The second measure in the first and the last quarter."""


def main() -> int:
    """0 when every case could be run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cases", default="", help="parts of names, with commas; default: all")
    options = parser.parse_args()
    wanted = options.cases.split(",")
    chosen = {name: case for name, case in CASES.items() if any(part in name for part in wanted)}
    outcomes: dict[str, list[Outcome]] = {name: [] for name in chosen}
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(options.seeds):
        for name, case in chosen.items():
            outcome = train(folder, name, case, seed)
            outcomes[name].append(outcome)
            print(f"seed {seed}, {name}: {describe(outcome)}", flush=True)
    print_table(outcomes, folder)
    return 0


def train(folder: Path, name: str, case: Case, seed: int) -> Outcome:
    """Run one case, or read what it came to when it ran before."""
    start = fine_tuned(folder, case.recipe, seed, case.start_steps)
    recipe = one_stage(folder, case.recipe, "rl")
    run = folder / f"{name.replace(', ', '_').replace(' ', '_')}_{seed}"
    settings = [*case.settings, "--model.name", str(start), "--seed", str(seed)]
    teacher: Any = nullcontext()
    if case.has_teacher and not is_finished(run):
        taught = fine_tuned(folder, case.recipe, seed, TEACHER_STEPS)
        teacher = serve_engine(taught, "--max-model-len", "64")
    with teacher as served:
        if served is not None:
            settings += ["--orchestrator.train.algo.teacher.base-url", served.url]
        run_once(recipe, run, settings)
    return read_outcome(run)


def fine_tuned(
    folder: Path, recipe: str, seed: int, steps: int | None = None, *changes: str
) -> Path:
    """The checkpoint a recipe's own fine-tuning, or a longer or changed one, ends with."""
    run = folder / f"{recipe}_start_{seed}{f'_{steps}' if steps else ''}"
    settings = ["--seed", str(seed), "--model.fresh.seed", str(seed), *changes]
    settings += ["--max-steps", str(steps)] if steps else []
    settings += ["--data.arguments.count", str(128 * steps)] if steps else []
    run_once(one_stage(folder, recipe, "sft"), run, settings)
    return run / "export"


def one_stage(folder: Path, recipe: str, kind: str) -> Path:
    """The recipe with its stage of this kind alone, which is not evaluated if it fine-tunes."""
    document = tomllib.loads((RECIPES / f"{recipe}.toml").read_text())
    stage = next(one for one in document["stages"] if one["type"] == kind)
    if kind == "sft":
        stage.pop("eval", None)
    else:
        del document["model"]
    path = folder / f"{recipe}_{kind}.toml"
    path.write_text(tomli_w.dumps({**document, "stages": [stage]}))
    return path


def run_once(
    recipe: Path, run: Path, settings: Sequence[str], environment: Mapping[str, str] | None = None
) -> None:
    """`prime run` with the settings unless it finished before; raises RuntimeError with its output."""
    if is_finished(run):
        return
    command = [sys.executable, "-m", "prime_rl.cli.main", "run", str(recipe), *settings]
    command += ["--output-dir", str(run.parent), "--run.name", run.name, "--clean"]
    result = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}")


def is_finished(run: Path) -> bool:
    """The run came to its end."""
    return (run / "finished.json").exists()


def read_outcome(run: Path) -> Outcome:
    """From the run's metrics."""
    rewards = [
        value
        for row in metrics(run, "eval")
        for key, value in row.items()
        if key.startswith("eval/") and key.endswith("/reward/mean")
    ]
    seconds = json.loads((run / "finished.json").read_text())["seconds"]
    return Outcome(rewards[0], rewards[-1], seconds, second_measure(run))


def second_measure(run: Path) -> tuple[float, float] | None:
    """KL from the teacher or cross-entropy in the first and the last quarter, if there is any."""
    rows = metrics(run, "trainer")
    if "ref_kl/mean" in rows[0]:
        return ends([row["ref_kl/mean"] for row in rows])
    if "nll/mean" not in rows[0]:
        return None
    first, last = ends([row["nll/mean"] for row in rows])
    samples_itself = "mismatch_kl/all" in rows[0]
    stream = run / "monitors" / "file" / "traces" / "stream.jsonl"
    entropy = 0.0 if samples_itself else -mean_sampled_logprob(stream)
    return first - entropy, last - entropy


def ends(values: list[float]) -> tuple[float, float]:
    """Means of the first and the last quarter."""
    part = max(1, len(values) // QUARTERS)
    return sum(values[:part]) / part, sum(values[-part:]) / part


def metrics(run: Path, producer: str) -> list[dict[str, Any]]:
    """Rows of one producer's metrics, by step."""
    path = run / "monitors" / "file" / "metrics" / f"{producer}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean_sampled_logprob(stream: Path) -> float:
    """Over all tokens of the training episodes, as their sampler reported them."""
    found = [
        logprob
        for episode in map(json.loads, stream.read_text().splitlines())
        if episode["split"] == "train"
        for trace in episode["traces"]
        for node in trace["nodes"]
        for logprob in node["logprobs"]
    ]
    return sum(found) / len(found)


def describe(outcome: Outcome) -> str:
    """One line."""
    text = f"reward {outcome.before:.3f} -> {outcome.after:.3f}"
    if outcome.nats:
        text += f", {outcome.nats[0]:.3f} -> {outcome.nats[1]:.3f} nats"
    return f"{text}, {outcome.seconds:.0f} s"


def print_table(outcomes: dict[str, list[Outcome]], folder: Path) -> None:
    """As Markdown, and the time of all runs together."""
    print("\n| case | reward before -> after, per seed | mean gain | nats per token | s per run |")
    print("|---|---|---|---|---|")
    for name, found in outcomes.items():
        rewards = ", ".join(f"{one.before:.3f} -> {one.after:.3f}" for one in found)
        gain = sum(one.after - one.before for one in found) / len(found)
        nats = ", ".join(f"{one.nats[0]:.3f} -> {one.nats[1]:.3f}" for one in found if one.nats)
        seconds = sum(one.seconds for one in found) / len(found)
        print(f"| {name} | {rewards} | {gain:+.3f} | {nats} | {seconds:.0f} |")
    ends_of_runs = [json.loads(path.read_text()) for path in folder.glob("*/finished.json")]
    total = sum(one["seconds"] for one in ends_of_runs)
    print(f"\n{len(ends_of_runs)} runs, {total / 60:.0f} minutes, fine-tuning included")


if __name__ == "__main__":
    sys.exit(main())
