"""The end of a run: one table of held-out results and a picture of the curves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from prime_rl.configs.paths import stage_name, stage_paths
from prime_rl.configs.run import RunConfig
from prime_rl.traces.metrics import read_metrics

PANELS = (
    ("reward (training episodes)", "orchestrator", "train/agg/all/reward/mean"),
    ("loss", "trainer", "loss/mean"),
    ("entropy (nats)", "trainer", "entropy/all"),
    ("mismatch KL", "trainer", "mismatch_kl/all"),
    ("trainer tokens/s", "trainer", "perf/throughput"),
    ("staleness (steps)", "orchestrator", "off_policy/mean"),
)


def evaluations(run: RunConfig, index: int) -> list[dict[str, Any]]:
    """Evaluation records of a stage in order of step."""
    records = read_metrics(stage_paths(run, index).metrics / "eval.jsonl")
    newest = {record["step"]: record for record in records}
    return [newest[step] for step in sorted(newest)]


def results_table(run: RunConfig) -> Table | None:
    """Held-out rewards at the borders of every stage, or None when nothing was evaluated."""
    table = Table(title="Held-out results", title_justify="left")
    for heading in ("weights", "source", "reward", "episodes"):
        table.add_column(heading, justify="left" if heading in ("weights", "source") else "right")
    for index in range(len(run.stages)):
        records = evaluations(run, index)
        borders = records if len(records) < 3 else [records[0], records[-1]]
        for record in borders:
            weights = _weights_label(run, index, record["step"])
            for source, reward, count in _rewards(record):
                table.add_row(weights, source, f"{reward:.3f}", str(count))
    return table if table.row_count else None


def _weights_label(run: RunConfig, index: int, step: int) -> str:
    if step == 0 and index == 0:
        return "start"
    if step == 0:
        return f"after {stage_name(run, index - 1)}"
    return f"after {stage_name(run, index)} (step {step})"


def _rewards(record: dict[str, Any]) -> list[tuple[str, float, int]]:
    suffix = "/reward/mean"
    found = []
    for key, value in record.items():
        if key.startswith("eval/") and key.endswith(suffix):
            source = key.removeprefix("eval/").removesuffix(suffix)
            found.append((source, value, int(record.get(f"eval/{source}/count", 0))))
    return found


def draw_report(run: RunConfig, path: Path) -> None:
    """Write the curves of every stage to a PNG file; stages follow each other on the step axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 3, figsize=(14, 7), constrained_layout=True)
    total = sum(stage.max_steps for stage in run.stages)
    for axis, (title, producer, metric) in zip(axes.flat, PANELS, strict=True):
        axis.set(title=title, xlabel="step, stages one after the other", xlim=(0, total * 1.02))
        axis.grid(alpha=0.3)
        for border in _offsets(run)[1:]:
            axis.axvline(border, color="0.6", linewidth=1, linestyle=":")
        _draw_stages(axis, run, producer, metric)
        if metric == PANELS[0][2]:
            _draw_evaluations(axis, run)
        if metric == "mismatch_kl/all" and _is_positive(axis):
            axis.set_yscale("log")
        if axis.get_legend_handles_labels()[1]:
            axis.legend(fontsize="small")
    figure.suptitle(run.run.name or run.directory.name)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_stages(axis: Any, run: RunConfig, producer: str, metric: str) -> None:
    """One curve per stage. Losses of different kinds of stage share no scale: the second kind gets
    an axis of its own on the right."""
    kinds = list(dict.fromkeys(stage.type for stage in run.stages))
    right = axis.twinx() if metric == "loss/mean" and len(kinds) > 1 else None
    for index, offset in enumerate(_offsets(run)):
        steps, values = _series(run, index, producer, metric)
        if not values:
            continue
        name, color = stage_name(run, index), f"C{index}"
        on_right = right is not None and run.stages[index].type != kinds[0]
        shown = right if right is not None and on_right else axis
        shown.plot([offset + step for step in steps], values, color=color)
        axis.plot([], [], color=color, label=f"{name} (right axis)" if on_right else name)


def _offsets(run: RunConfig) -> list[int]:
    """Steps of all earlier stages, per stage."""
    return [sum(stage.max_steps for stage in run.stages[:i]) for i in range(len(run.stages))]


def _series(
    run: RunConfig, index: int, producer: str, metric: str
) -> tuple[Sequence[int], Sequence[float]]:
    records = read_metrics(stage_paths(run, index).metrics / f"{producer}.jsonl")
    points = {r["step"]: r[metric] for r in records if r.get(metric) is not None}
    steps = sorted(points)
    return steps, [points[step] for step in steps]


def _draw_evaluations(axis: Any, run: RunConfig) -> None:
    points: dict[str, list[tuple[int, float]]] = {}
    for index, offset in enumerate(_offsets(run)):
        for record in evaluations(run, index):
            for source, reward, _ in _rewards(record):
                points.setdefault(source, []).append((offset + record["step"], reward))
    for source, pairs in points.items():
        axis.plot(*zip(*pairs, strict=True), "o--", color="C7", label=f"evaluated: {source}")


def _is_positive(axis: Any) -> bool:
    """Something above zero is drawn: a logarithmic scale has something to show."""
    return any(max(line.get_ydata(), default=0.0) > 0 for line in axis.lines)
