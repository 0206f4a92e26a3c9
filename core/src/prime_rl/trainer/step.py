"""One optimizer step: rows forward and backward, the norm bounded, weights moved."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from prime_rl.api import Loss
from prime_rl.errors import RunError
from prime_rl.parallel.collectives import sum_over_ranks
from prime_rl.parallel.gradients import reduce_gradients_now
from prime_rl.parallel.world import World
from prime_rl.trainer.batch import Row
from prime_rl.trainer.loss import ComponentStreams, row_loss
from prime_rl.trainer.metrics import TokenMeans, reduce_means
from prime_rl.trainer.optim import clip_gradients, gradient_norm, set_learning_rate
from prime_rl.trainer.routing_load import RoutingLoad
from prime_rl.trainer.schedule import Schedule
from prime_rl.trainer.streams import Totals


@dataclass(frozen=True)
class StepBatch:
    """The rows of a step on one rank. Every rank has the same number of rows."""

    step: int
    totals: Totals
    """Of this rank's rows."""
    count: int
    rows: Iterator[Row]
    """Exactly `count` of them, converted as they are asked for."""


@dataclass(frozen=True)
class RowTrace:
    """What the trainer computed about the tokens of a row, for annotations; on the device."""

    row: Row
    logprobs: Tensor
    """float32 [N]"""
    entropies: Tensor | None
    components: list[ComponentStreams]


@dataclass
class StepResult:
    """A finished step."""

    totals: Totals
    """Over all ranks."""
    metrics: dict[str, float]
    """Over all ranks; loss, optimizer and per-token means."""
    lengths: list[int] = field(default_factory=list)
    """Lengths of this rank's documents, padding included: what was computed."""
    traces: list[RowTrace] = field(default_factory=list)
    load_s: float = 0.0
    """Seconds spent waiting for rows."""
    compute_s: float = 0.0
    """Seconds of forward, backward and optimizer."""


class Stepper:
    """Takes optimizer steps on a policy; knows nothing of where batches come from."""

    def __init__(
        self,
        policy: nn.Module,
        loss: Loss,
        optimizer: torch.optim.Optimizer,
        schedule: Schedule,
        world: World,
        max_norm: float | None,
        keep_traces: bool = False,
        experts: int = 0,
    ) -> None:
        """`keep_traces`: results carry every token's numbers. `experts`: experts per layer whose
        load is reported; 0: none."""
        self.policy = policy
        self.loss = loss
        self.optimizer = optimizer
        self.schedule = schedule
        self.world = world
        self.max_norm = max_norm
        self.keep_traces = keep_traces
        self._routing = RoutingLoad(experts)
        self._parameters = [p for p in policy.parameters() if p.requires_grad]

    def step(self, batch: StepBatch) -> StepResult:
        """Train on one batch. Raises RunError when the loss or the gradients are not finite; with
        gradients that are not, the weights have not moved."""
        totals = self._sum_totals(batch)
        result = StepResult(totals=totals, metrics={})
        means = TokenMeans()
        losses: list[Tensor] = []
        started = time.perf_counter()
        for number in range(batch.count):
            waiting_since = time.perf_counter()
            row = next(batch.rows)
            result.load_s += time.perf_counter() - waiting_since
            reduce_gradients_now(self.policy, number == batch.count - 1)
            self._row(row, totals, means, losses, result)
        norm = self._update()
        self._finish(result, batch.step, means, losses, norm)
        result.compute_s = time.perf_counter() - started - result.load_s
        return result

    def _sum_totals(self, batch: StepBatch) -> Totals:
        """Totals of all ranks. Raises RunError when they have different numbers of rows: each
        would wait for the others in a collective of its own."""
        *sums, rows = sum_over_ranks(self.world, [*batch.totals.as_list(), float(batch.count)])
        if rows != batch.count * self.world.size:
            raise RunError(
                f"step {batch.step}: rank {self.world.rank} has {batch.count} rows, all "
                f"{self.world.size} ranks together {rows:g}; every rank needs the same number"
            )
        return Totals(*sums)

    def _row(
        self,
        row: Row,
        totals: Totals,
        means: TokenMeans,
        losses: list[Tensor],
        result: StepResult,
    ) -> None:
        with self._routing.watch(len(row.streams.input_ids) - row.streams.padding_tokens):
            logprobs, entropies = self.policy(row)
        outcome = row_loss(row, logprobs, self.loss, totals)
        (outcome.total * self.world.size).backward()
        losses.append(outcome.total.detach())
        logprobs = logprobs.detach()
        with_entropy = getattr(self.policy, "with_entropy", True)
        means.add_row(row, entropies if with_entropy else None, outcome.components)
        result.lengths += row.packed.lengths
        if self.keep_traces:
            result.traces.append(
                RowTrace(row, logprobs, entropies if with_entropy else None, outcome.components)
            )

    def _update(self) -> float:
        """Bound the norm, move the weights; returns the norm before the bound."""
        norm = gradient_norm(self._parameters)
        value = norm.item()
        if math.isfinite(value):
            if self.max_norm is not None and value > self.max_norm:
                clip_gradients(self._parameters, norm, self.max_norm)
            set_learning_rate(self.optimizer, self.schedule.lr)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return value

    def _finish(
        self, result: StepResult, step: int, means: TokenMeans, losses: list[Tensor], norm: float
    ) -> None:
        table = means.local()
        table["loss/sum"] = [float(torch.stack(losses).sum().item()), 1.0]
        metrics = reduce_means(self.world, table) | self._routing.metrics(self.world)
        loss = metrics.pop("loss/sum") * self.world.size
        self._check(step, loss, norm, metrics)
        metrics["loss/mean"] = loss
        metrics["optim/lr"] = self.schedule.lr
        metrics["optim/grad_norm"] = norm
        if metrics.get("entropy/all"):
            kl = metrics.get("mismatch_kl/all")
            if kl is not None:
                metrics["kl_ent_ratio/mean"] = kl / metrics["entropy/all"]
        self.schedule.advance()
        result.metrics = metrics

    def _check(self, step: int, loss: float, norm: float, metrics: dict[str, float]) -> None:
        if math.isfinite(norm) and math.isfinite(loss):
            return
        bad = [name for name, value in metrics.items() if not math.isfinite(value)]
        raise RunError(
            f"step {step}: gradient norm {norm}, loss {loss}. Not finite: "
            f"{', '.join(bad) or 'only the gradients'}. The streams of the batch were finite, so "
            "look at the model's own numbers (trainer_logprobs), the loss plugin, or a learning "
            "rate that is too large."
        )
