"""Optimizer steps on a toy model against a loop written by hand; metrics; annotations."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from prime_rl.api import Loss, LossOutput, Model
from prime_rl.configs.base import PluginConfig
from prime_rl.configs.trainer import AdamWConfig, ConstantScheduleConfig
from prime_rl.errors import RunError
from prime_rl.layers.routing import record
from prime_rl.parallel.world import World
from prime_rl.traces.annotations import AnnotationWriter
from prime_rl.trainer.annotate import Annotator
from prime_rl.trainer.batch import build_row
from prime_rl.trainer.optim import build_optimizer
from prime_rl.trainer.policy import Policy
from prime_rl.trainer.recompute import recompute_in_backward
from prime_rl.trainer.routing_load import RoutingLoad
from prime_rl.trainer.schedule import Schedule
from prime_rl.trainer.speed import peak_flops, speed_metrics
from prime_rl.trainer.step import StepBatch, Stepper
from prime_rl.trainer.streams import Streams, Totals

CPU = torch.device("cpu")
VOCABULARY, HIDDEN = 7, 5


class Toy(nn.Module):
    """Embedding, one block per token, and a head, tied or not."""

    def __init__(self, tied):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.embed_tokens = nn.Embedding(VOCABULARY, HIDDEN)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(HIDDEN, HIDDEN), nn.Tanh())])
        self.lm_head = None if tied else nn.Linear(HIDDEN, VOCABULARY, bias=False)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0.0, 0.5, generator=generator)

    def forward(self, batch):
        return self.layers[0](self.embed_tokens(batch.input_ids))


class ToyPlugin(Model):
    """Only what a step needs."""

    def architecture(self, config):
        raise NotImplementedError

    def build(self, architecture, kernels):
        raise NotImplementedError

    def initialise(self, module, generator):
        raise NotImplementedError

    def layout(self, architecture):
        raise NotImplementedError

    def flops(self, architecture, seq_lens):
        raise NotImplementedError


class RatioLoss(Loss):
    """-A * r, with a keep mask that drops negative advantages."""

    def compute(self, inputs):
        keep = inputs.advantages >= 0
        ratio = (inputs.trainer_logprobs - inputs.inference_logprobs).exp()
        ratio = ratio.masked_fill(~keep, 0.0)
        return LossOutput(-inputs.advantages * ratio, {"ratio": ratio.detach()}, keep)


class Exploding(Loss):
    """A loss whose gradient is infinite."""

    def compute(self, inputs):
        return LossOutput(inputs.trainer_logprobs * float("inf"))


def stepper_of(model, loss=None, max_norm=0.1, keep_traces=False):
    policy = Policy(ToyPlugin(PluginConfig(type="toy")), model, chunk_tokens=2, with_entropy=True)
    config = AdamWConfig(lr=0.1, weight_decay=0.0)
    return Stepper(
        policy,
        loss or RatioLoss(PluginConfig(type="ratio")),
        build_optimizer(config, policy.parameters(), "rl"),
        Schedule(ConstantScheduleConfig(warmup_steps=2), config.lr, 10),
        World(0, 1, CPU, None),
        max_norm,
        keep_traces,
    )


def documents(seed=0, lengths=(4, 3, 5), envs=(0, 1, 0)):
    """One row of several documents; the first token of each is a prompt."""
    chance = np.random.default_rng(seed)
    count = sum(lengths)
    starts = np.cumsum((0, *lengths[:-1]))
    mask = np.ones(count, bool)
    mask[starts] = False
    return Streams(
        input_ids=chance.integers(0, VOCABULARY, count).astype(np.int32),
        lengths=tuple(lengths),
        loss_mask=mask,
        temperatures=np.full(count, 0.7, np.float32),
        inference_logprobs=(-2 * chance.random(count)).astype(np.float32),
        advantages=chance.standard_normal(count).astype(np.float32),
        env_names=("first", "second"),
        document_envs=tuple(envs),
        trace_ids=tuple(f"trace-{index}" if index != 1 else "" for index in range(len(lengths))),
        branch_indices=tuple(range(len(lengths))),
    )


def batch_of(step, rows):
    totals = sum((row.totals for row in rows), Totals())
    return StepBatch(step, totals, len(rows), (build_row(row, CPU) for row in rows))


def by_hand(model, rows, steps):
    """Losses and norms of a bare loop, one document at a time, with full logits."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    count = sum(row.totals.rl for row in rows)
    rates = [1e-8 * 0.1, 0.5 * (1 + 1e-8) * 0.1, 0.1, 0.1]
    losses, norms = [], []
    for step in range(steps):
        optimizer.zero_grad()
        total = torch.zeros(())
        for row in rows:
            start = 0
            for length in row.lengths:
                part = slice(start, start + length)
                start += length
                ids = torch.from_numpy(row.input_ids[part]).long()
                hidden = model.layers[0](model.embed_tokens(ids[:-1]))
                head = model.embed_tokens if model.lm_head is None else model.lm_head
                logprobs = torch.log_softmax(hidden @ head.weight.T / 0.7, 1)
                chosen = logprobs.gather(1, ids[1:, None]).squeeze(1)
                advantages = torch.from_numpy(row.advantages[part])[1:].clamp(min=0)
                sampled = torch.from_numpy(row.inference_logprobs[part])[1:]
                total = total - (advantages * (chosen - sampled).exp()).sum() / count
        total.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        optimizer.step()
        losses.append(total.item())
    return losses, norms


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("rows", [[documents()], [documents(0), documents(1, (2, 9), (1, 1))]])
def test_steps_equal_a_loop_written_by_hand(tied, rows):
    expected = by_hand(Toy(tied), rows, steps=4)
    stepper = stepper_of(Toy(tied))
    results = [stepper.step(batch_of(step, rows)).metrics for step in (1, 2, 3, 4)]
    assert [m["loss/mean"] for m in results] == pytest.approx(expected[0], rel=1e-5)
    assert [m["optim/grad_norm"] for m in results] == pytest.approx(expected[1], rel=1e-5)
    assert [m["optim/lr"] for m in results] == pytest.approx([1e-9, 0.05, 0.1, 0.1], rel=1e-6)


def test_recomputed_activations_change_nothing():
    rows = [documents()]
    plain, recomputing = Toy(True), Toy(True)
    recompute_in_backward(recomputing.layers[0])
    names = [name for name, _ in recomputing.named_parameters()]
    assert names == [name for name, _ in plain.named_parameters()]
    found = [
        [stepper.step(batch_of(step, rows)).metrics["loss/mean"] for step in (1, 2, 3)]
        for stepper in (stepper_of(plain), stepper_of(recomputing))
    ]
    assert found[0] == found[1]


def test_metrics_are_means_over_tokens_and_split_by_environment():
    row = documents()
    metrics = stepper_of(Toy(True)).step(batch_of(1, [row])).metrics
    counts = {"first": 3 + 4, "second": 2}
    for name in ("entropy", "mismatch_kl"):
        parts = sum(metrics[f"{name}/{env}"] * count for env, count in counts.items())
        assert metrics[f"{name}/all"] == pytest.approx(parts / 9, rel=1e-5)
    dropped = (row.advantages[row.loss_mask] < 0).mean()
    assert metrics["is_masked/mean"] == pytest.approx(dropped)
    assert metrics["kl_ent_ratio/mean"] == pytest.approx(
        metrics["mismatch_kl/all"] / metrics["entropy/all"]
    )
    assert metrics["ratio/mean"] > 0


def test_batch_without_signal_takes_a_step_that_moves_nothing():
    """Every advantage zero: the step counts, loss and gradients are zero."""
    row = documents()
    silent = Streams(**{**vars_of(row), "advantages": np.zeros_like(row.advantages)})
    model = Toy(True)
    before = [parameter.clone() for parameter in model.parameters()]
    metrics = stepper_of(model).step(batch_of(1, [silent])).metrics
    assert metrics["loss/mean"] == 0 and metrics["optim/grad_norm"] == 0
    for old, new in zip(before, model.parameters(), strict=True):
        torch.testing.assert_close(old, new.detach(), rtol=0, atol=0)


def vars_of(row):
    return {name: getattr(row, name) for name in row.__dataclass_fields__}


def test_infinite_gradient_is_an_error_and_moves_nothing():
    model = Toy(True)
    before = [parameter.clone() for parameter in model.parameters()]
    stepper = stepper_of(model, Exploding(PluginConfig(type="exploding")))
    with pytest.raises(RunError, match="step 1: gradient norm (nan|inf)"):
        stepper.step(batch_of(1, [documents()]))
    assert all(old.equal(new) for old, new in zip(before, model.parameters(), strict=True))


def test_every_token_of_a_known_trace_is_annotated(tmp_path):
    row = documents()
    stepper = stepper_of(Toy(True), keep_traces=True)
    result = stepper.step(batch_of(1, [row]))
    annotator = Annotator(AnnotationWriter(tmp_path, "trainer_0"))
    annotator.add(1, result.traces)
    annotator.flush()
    lines = (tmp_path / "annotations" / "trainer_0.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    assert [record["trace_id"] for record in records] == ["trace-0", "trace-2"]
    branch = records[1]["branches"][0]
    assert branch["index"] == 2 and records[1]["step"] == 1
    for name in ("trainer_logprobs", "entropies", "mismatch_kl", "is_masked", "ratio"):
        assert len(branch[name]) == 5 and branch[name][0] is None
        assert all(value is not None for value in branch[name][1:])
    advantages = row.advantages[7:][1:]
    assert branch["is_masked"][1:] == [bool(a < 0) for a in advantages]
    ratios = np.exp(np.array(branch["trainer_logprobs"][1:]) - row.inference_logprobs[8:])
    expected = [r - 1 - math.log(r) for r in ratios]
    assert branch["mismatch_kl"][1:] == pytest.approx(expected, rel=1e-3, abs=1e-5)
    annotator.close()


class FullDisk:
    """A writer that cannot write."""

    def write(self, *record):
        raise OSError("no space left")

    def flush(self):
        pass

    def close(self):
        pass


def test_failed_annotation_stops_the_trainer():
    result = stepper_of(Toy(True), keep_traces=True).step(batch_of(1, [documents()]))
    annotator = Annotator(FullDisk())
    annotator.add(1, result.traces)
    with pytest.raises(OSError, match="no space left"):
        annotator.flush()
    annotator.close()


def test_load_of_experts_by_hand():
    """Tokens of 3 experts: 4, 1, 1 in layer 0 and 2, 2, 2 in layer 1."""
    load = RoutingLoad(experts=3)
    for first, second in (([0, 0, 0], [0, 1, 2]), ([0, 1, 2], [2, 1, 0])):
        with load.watch(3):
            record(0, torch.tensor([*first, 2, 2])[:, None])  # two tokens of padding
            record(1, torch.tensor([*second, 2, 2])[:, None])
    assert load.metrics(World(0, 1, CPU, None)) == {"max_vio/mean": pytest.approx(0.5)}
    assert load.metrics(World(0, 1, CPU, None)) == {}


class Experts(nn.Module):
    """Chooses an expert by the token, records it and leaves the state as it is."""

    def forward(self, hidden):
        record(0, (hidden[:, :1] > 0).long())
        return hidden


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("padding", [0, 2])
def test_experts_count_once_and_without_padding(recompute, padding):
    model = Toy(True)
    model.layers[0].append(Experts())
    if recompute:
        recompute_in_backward(model.layers[0])
    row = documents(lengths=(4, 3), envs=(0, 1))
    row = dataclasses.replace(row, padding_tokens=padding)
    states = model.layers[0](model.embed_tokens(torch.from_numpy(row.input_ids).long()))
    first = (states[: 7 - padding, 0] > 0).sum().item()
    loads = [first, 7 - padding - first]
    stepper = stepper_of(model)
    stepper._routing = RoutingLoad(experts=2)
    metrics = stepper.step(batch_of(1, [row])).metrics
    expected = max(loads) / (sum(loads) / 2) - 1
    assert metrics["max_vio/mean"] == pytest.approx(expected)


def test_speed():
    metrics = speed_metrics(tokens=1000, training_flops=6e9, seconds=2.0, ranks=2, peak=3e9)
    assert metrics == {
        "perf/throughput": 500.0,
        "perf/throughput_per_gpu": 250.0,
        "perf/mfu": pytest.approx(50.0),
    }
    assert peak_flops(CPU) > 1e8
