"""What a person sees while a stage runs: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

from prime_rl.configs.paths import StagePaths
from prime_rl.configs.run import RLConfig, SFTConfig
from prime_rl.traces.metrics import read_metrics

REFRESH_S = 0.5

RL_COLUMNS = (
    # (label, producer, metric, format)
    ("reward", "orchestrator", "train/agg/all/reward/mean", "{:.3f}"),
    ("loss", "trainer", "loss/mean", "{:+.4f}"),
    ("entropy", "trainer", "entropy/all", "{:.3f}"),
    ("mismatch KL", "trainer", "mismatch_kl/all", "{:.1e}"),
    ("stale", "orchestrator", "off_policy/mean", "{:.2f}"),
    ("tokens/s", "trainer", "perf/throughput", "{:,.0f}"),
    ("step time", "trainer", "time/step", "{:.2f} s"),
)
SFT_COLUMNS = (
    ("loss", "trainer", "loss/mean", "{:.4f}"),
    ("grad norm", "trainer", "optim/grad_norm", "{:.3f}"),
    ("lr", "trainer", "optim/lr", "{:.1e}"),
    ("tokens/s", "trainer", "perf/throughput", "{:,.0f}"),
    ("step time", "trainer", "time/step", "{:.2f} s"),
)
RECENT_ROWS = 8


class StageView:
    """Follows the metric files of a stage. Use as a context manager; call `observe` often."""

    def __init__(
        self, console: Console, title: str, stage: SFTConfig | RLConfig, paths: StagePaths
    ) -> None:
        self._console = console
        self._title = title
        self._stage = stage
        self._paths = paths
        self._columns = RL_COLUMNS if isinstance(stage, RLConfig) else SFT_COLUMNS
        self._started_at = time.monotonic()
        self._first_step: tuple[int, float] | None = None
        self._next_look = 0.0
        self._printed_step = 0
        self._live: Live | None = None

    def __enter__(self) -> StageView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=2, transient=False)
            self._live.start()
        else:
            self._console.print(f"{self._title}: {self._stage.max_steps} steps", soft_wrap=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._next_look = 0.0
        self.observe(last=True)
        if self._live is not None:
            self._live.stop()

    def observe(self, last: bool = False) -> None:
        """Look at the metric files when it is time to."""
        now = time.monotonic()
        if now < self._next_look:
            return
        rows = self._rows()
        step = rows[-1]["step"] if rows else 0
        if rows and self._first_step is None:
            self._first_step = (rows[0]["step"], now)
        if self._live is not None:
            self._live.update(self._table(rows, step, now))
            self._next_look = now + REFRESH_S
        elif rows and (step > self._printed_step) and (last or rows[-1]):
            self._console.print(self._line(rows[-1], step, now), soft_wrap=True)
            self._printed_step = step
            self._next_look = now + self._stage.log.interval_s

    def _rows(self) -> list[dict[str, Any]]:
        """One row per step the trainer has finished, with the orchestrator's figures joined."""
        trainer = read_metrics(self._paths.metrics / "trainer.jsonl")
        by_step: dict[int, dict[str, Any]] = {}
        for record in trainer:
            by_step.setdefault(record["step"], {"step": record["step"]})["trainer"] = record
        if isinstance(self._stage, RLConfig):
            for record in read_metrics(self._paths.metrics / "orchestrator.jsonl"):
                if record["step"] in by_step:
                    by_step[record["step"]]["orchestrator"] = record
        return [by_step[step] for step in sorted(by_step)]

    def _cell(self, row: dict[str, Any], producer: str, metric: str, form: str) -> str:
        value = row.get(producer, {}).get(metric)
        return "-" if value is None else form.format(value)

    def _time_left(self, step: int, now: float) -> str:
        if self._first_step is None or step <= self._first_step[0]:
            return "-"
        first, at = self._first_step
        seconds = (now - at) / (step - first) * (self._stage.max_steps - step)
        return _clock(seconds)

    def _line(self, row: dict[str, Any], step: int, now: float) -> str:
        cells = [
            f"{label} {self._cell(row, producer, metric, form)}"
            for label, producer, metric, form in self._columns
        ]
        left = self._time_left(step, now)
        return f"step {step}/{self._stage.max_steps} | " + " | ".join([*cells, f"left {left}"])

    def _table(self, rows: list[dict[str, Any]], step: int, now: float) -> Group:
        table = Table(title=self._title, title_justify="left", expand=False)
        table.add_column("step", justify="right")
        for label, *_ in self._columns:
            table.add_column(label, justify="right")
        for row in rows[-RECENT_ROWS:]:
            cells = [self._cell(row, *rest) for _, *rest in self._columns]
            table.add_row(str(row["step"]), *cells)
        elapsed = _clock(now - self._started_at)
        if not rows:
            return Group(f"{self._title}: starting the processes, {elapsed}")
        bar = Progress(
            TextColumn("{task.completed}/{task.total} steps"),
            BarColumn(bar_width=40),
            TextColumn(f"elapsed {elapsed}, left {self._time_left(step, now)}"),
        )
        bar.add_task("steps", total=self._stage.max_steps, completed=step)
        return Group(table, bar)


def _clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds // 60)}:{int(seconds % 60):02d}"
