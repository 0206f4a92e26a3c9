"""Means over the tokens of a step: gathered per row on the device, reduced over ranks once."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from prime_rl.parallel.collectives import gather_json
from prime_rl.parallel.world import World
from prime_rl.trainer.batch import Row
from prime_rl.trainer.loss import ComponentStreams

PER_ENVIRONMENT = ("entropy", "mismatch_kl")
"""Streams that are also split by environment: `<stream>/all` and `<stream>/<environment>`."""


@dataclass
class TokenMeans:
    """Sums and counts of per-token streams by metric name, of one step on one rank."""

    sums: list[Tensor] = field(default_factory=list)
    """Scalars on the device, one per entry of `names`."""
    names: list[str] = field(default_factory=list)
    counts: list[float] = field(default_factory=list)

    def add(self, name: str, values: Tensor) -> None:
        """All values of a stream belong to the metric `name`."""
        self.names.append(name)
        self.sums.append(values.sum(dtype=torch.float32))
        self.counts.append(float(values.shape[0]))

    @torch.no_grad()
    def add_row(
        self, row: Row, entropies: Tensor | None, components: list[ComponentStreams]
    ) -> None:
        """The streams of one row; `entropies` is [N], None when they were not computed."""
        if entropies is not None and row.count:
            self._add_split("entropy", entropies, row, row.env_ids)
        for component in components:
            env_ids = None if row.env_ids is None else component.members.take(row.env_ids)
            for name, values in component.streams.items():
                if name in PER_ENVIRONMENT:
                    self._add_split(name, values, row, env_ids)
                else:
                    self.add(f"{name}/mean", values)

    def _add_split(self, name: str, values: Tensor, row: Row, env_ids: Tensor | None) -> None:
        """To `<name>/all` and to each environment; env_ids None: the row has one."""
        self.add(f"{name}/all", values)
        streams = row.streams
        if env_ids is None:
            index = streams.document_envs[0] if streams.document_envs else 0
            if streams.env_names[index]:
                self.names.append(f"{name}/{streams.env_names[index]}")
                self.sums.append(self.sums[-1])
                self.counts.append(self.counts[-1])
            return
        for index in sorted(set(streams.document_envs)):
            self.add(f"{name}/{streams.env_names[index]}", values[env_ids == index])

    def local(self) -> dict[str, list[float]]:
        """Metric -> [sum, count] of this rank; waits for the device once."""
        table: dict[str, list[float]] = {}
        values = torch.stack(self.sums).tolist() if self.sums else []
        for name, value, count in zip(self.names, values, self.counts, strict=True):
            entry = table.setdefault(name, [0.0, 0.0])
            entry[0] += value
            entry[1] += count
        return table


def reduce_means(world: World, table: dict[str, list[float]]) -> dict[str, float]:
    """Means over all ranks: a collective. Metrics without a token are left out."""
    merged: dict[str, list[float]] = {}
    for part in gather_json(world, table):
        for name, (value, count) in part.items():
            entry = merged.setdefault(name, [0.0, 0.0])
            entry[0] += value
            entry[1] += count
    return {name: value / count for name, (value, count) in merged.items() if count > 0}
