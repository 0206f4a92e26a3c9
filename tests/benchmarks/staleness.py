"""IPO against IcePop on stale episodes: masked fraction, mismatch KL and reward over the steps, as a plot.

The quickstart's fine-tuned model is trained with RL on episodes that end long after their reply
(`late_words.py`). Training waits for them, so a batch is as many versions old as batches are in flight.
What was run already in the folder is not run again.

Run: python tests/benchmarks/staleness.py FOLDER [--lags 16,32] [--steps 100] [--seeds 2]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from learning import ends, fine_tuned, metrics, one_stage, run_once

LOSSES = ("ipo", "icepop")
PANELS = {
    "masked fraction": ("trainer", "is_masked/mean"),
    "mismatch KL": ("trainer", "mismatch_kl/all"),
    "reward": ("orchestrator", "train/agg/all/reward/mean"),
}
"""Title -> producer and metric."""
BATCH = 64
STEP_S = 1.2
"""Seconds a step is held back to; two cores train and generate faster."""
FIND_TASK_SET = {"PYTHONPATH": str(Path(__file__).parent)}
SOURCE = "--orchestrator.train.source.0"


def main() -> int:
    """0 when every run came to its end."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lags", default="16,32")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=2)
    options = parser.parse_args()
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    lags = [int(lag) for lag in options.lags.split(",")]
    runs: dict[tuple[int, str], list[Path]] = {}
    for seed in range(options.seeds):
        for lag in lags:
            for loss in LOSSES:
                run = train(folder, loss, lag, options.steps, seed)
                runs.setdefault((lag, loss), []).append(run)
                print(f"seed {seed}, lag {lag}, {loss}: {describe(run)}", flush=True)
    picture = folder / "staleness.png"
    draw(runs, lags, picture)
    print(picture)
    return 0


def train(folder: Path, loss: str, lag: int, steps: int, seed: int) -> Path:
    """The directory of one run."""
    run = folder / f"{loss}_lag_{lag}_{seed}"
    settings = ["--model.name", str(fine_tuned(folder, "quickstart", seed)), "--seed", str(seed)]
    settings += ["--trainer.loss", loss, "--max-steps", str(steps)]
    settings += ["--orchestrator.target-lag", str(lag), "--orchestrator.batch-size", str(BATCH)]
    settings += ["--orchestrator.max-off-policy-steps", str(2 * lag)]
    settings += ["--orchestrator.concurrency.max-inflight", str(BATCH * lag)]
    settings += ["--orchestrator.concurrency.initial-inflight", str(BATCH * lag)]
    settings += ["--orchestrator.concurrency.ramp-window-s", "0"]
    settings += [f"{SOURCE}.env.taskset.id", "late_words"]
    settings += [f"{SOURCE}.env.taskset.late-s", str(STEP_S * lag)]
    run_once(one_stage(folder, "quickstart", "rl"), run, settings, os.environ | FIND_TASK_SET)
    return run


def describe(run: Path) -> str:
    """First and last quarter of what is drawn, and the staleness that was really there."""
    lag = [row["off_policy/mean"] for row in metrics(run, "orchestrator")]
    found = [f"staleness {ends(lag)[1]:.1f} in the last quarter"]
    for title, (producer, metric) in PANELS.items():
        first, last = ends([row[metric] for row in metrics(run, producer) if metric in row])
        found.append(f"{title} {first:.3g} -> {last:.3g}")
    return ", ".join(found)


def draw(runs: dict[tuple[int, str], list[Path]], lags: list[int], picture: Path) -> None:
    """One row per lag, one panel per metric, one thin line per run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    size = (4.4 * len(PANELS), 2.9 * len(lags))
    figure, axes = pyplot.subplots(
        len(lags), len(PANELS), figsize=size, squeeze=False, constrained_layout=True
    )
    for row, lag in zip(axes, lags, strict=True):
        for axis, (title, source) in zip(row, PANELS.items(), strict=True):
            axis.set(title=f"{title}, lag {lag}", xlabel="step")
            axis.grid(alpha=0.3)
            for color, loss in enumerate(LOSSES):
                draw_runs(axis, runs[lag, loss], source, loss, f"C{color}")
            if title == "mismatch KL":
                axis.set_yscale("log")
            axis.legend(fontsize="small")
    figure.savefig(picture, dpi=100)
    pyplot.close(figure)


def draw_runs(axis: Any, runs: list[Path], source: tuple[str, str], loss: str, color: str) -> None:
    """The metric of every run of one loss."""
    producer, metric = source
    for number, run in enumerate(runs):
        rows = [row for row in metrics(run, producer) if metric in row]
        values = [row[metric] for row in rows]
        steps = [row["step"] for row in rows]
        label = loss if number == 0 else None
        axis.plot(steps, values, color=color, linewidth=1, alpha=0.8, label=label)


if __name__ == "__main__":
    sys.exit(main())
