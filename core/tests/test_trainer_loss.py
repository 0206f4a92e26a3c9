"""The three-component loss on numbers worked out by hand; masked values never count."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from prime_rl.api import Loss, LossOutput
from prime_rl.configs.base import PluginConfig
from prime_rl.errors import PluginError, RunError
from prime_rl.trainer.batch import build_row
from prime_rl.trainer.loss import capped_ratio, mismatch_kl, row_loss
from prime_rl.trainer.metrics import TokenMeans, reduce_means
from prime_rl.trainer.streams import Streams, Totals

CPU = torch.device("cpu")
NAN, INF = float("nan"), float("inf")


class PlainLoss(Loss):
    """-A * lt: linear, so that every sum can be done in the head."""

    def compute(self, inputs):
        loss = -inputs.advantages * inputs.trainer_logprobs
        return LossOutput(loss, {"seen": torch.ones_like(loss.detach())})


class MeanLoss(Loss):
    """Breaks the contract: averages by itself."""

    def compute(self, inputs):
        return LossOutput((-inputs.advantages * inputs.trainer_logprobs).mean())


def streams(lengths, mask, **given):
    """A row; streams default to zeros, temperatures to one."""
    count = sum(lengths)

    def array(values):
        return np.asarray(values, np.float32)

    values = {
        "inference_logprobs": np.zeros(count, np.float32),
        **{name: array(stream) for name, stream in given.items()},
    }
    return Streams(
        input_ids=np.arange(count, dtype=np.int32),
        lengths=tuple(lengths),
        loss_mask=np.asarray(mask, bool),
        temperatures=values.pop("temperatures", np.ones(count, np.float32)),
        **values,
    )


def run(rows, logprobs, loss=None, totals=None):
    """(loss of all rows, gradient of every row) with given trainer log-probabilities [S]."""
    if totals is None:
        totals = sum((row.totals for row in rows), Totals())
    total, gradients = 0.0, []
    for row, values in zip(rows, logprobs, strict=True):
        leaf = torch.tensor(values, dtype=torch.float32, requires_grad=True)
        built = build_row(row, CPU)
        chosen = leaf[torch.from_numpy(row.scored)]
        outcome = row_loss(
            built, chosen, loss or PlainLoss(PluginConfig(type="plain")), totals
        ).total
        outcome.backward()
        total += outcome.item()
        gradients.append([0.0] * len(values) if leaf.grad is None else leaf.grad.tolist())
    return total, gradients


def test_rl_by_hand():
    row = streams([4], [0, 1, 1, 0], advantages=[0, 2, -1, 0])
    total, (gradient,) = run([row], [[9, -1, -3, 9]])
    assert total == pytest.approx((2 * 1 - 1 * 3) / 2)
    assert gradient == [0, -1, 0.5, 0]


def test_every_token_masked():
    row = streams([3], [0, 0, 0], advantages=[1, 2, 3])
    total, (gradient,) = run([row], [[1, 2, 3]])
    assert total == 0.0 and gradient == [0, 0, 0]
    assert row.totals.scored == 0


def test_padding_only_row_contributes_nothing_and_runs_backward():
    """A rank with padding alone: same loss as without it, and its backward reaches the model."""
    full = streams([6], [0, 1, 1, 1, 1, 1], advantages=[0, 1, 1, 1, 1, 1])
    padding = streams([4], [0, 0, 0, 0], advantages=[0] * 4)
    alone, _ = run([full], [[-1.0] * 6])
    both, gradients = run([full, padding], [[-1.0] * 6, [-1.0] * 4])
    assert both == alone == pytest.approx(1.0)
    assert gradients[1] == [0.0] * 4
    leaf = torch.ones(3, requires_grad=True)
    empty = row_loss(
        build_row(padding, CPU), leaf[:0] * 2, PlainLoss(PluginConfig(type="plain")), full.totals
    )
    empty.total.backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [0, 0, 0]


def test_one_denominator_for_the_whole_step():
    """Rows of 1 and 3 tokens with losses 4 and 0: 1.0, not the mean of means 2.0."""
    rows = [
        streams([2], [0, 1], advantages=[0, 4]),
        streams([4], [0, 1, 1, 1], advantages=[0, 0, 0, 0]),
    ]
    total, _ = run(rows, [[0, -1], [0, -1, -1, -1]])
    assert total == pytest.approx(1.0)


@pytest.mark.parametrize("cut", [[8], [4, 4], [2, 2, 4], [2, 2, 2, 2]])
def test_any_split_gives_the_same_loss(cut):
    generator = np.random.default_rng(0)
    advantages, logprobs = generator.standard_normal(8), -generator.random(8)
    mask = [0, 1] * 4
    rows, parts, start = [], [], 0
    for size in cut:
        part = slice(start, start + size)
        rows.append(streams([2] * (size // 2), mask[part], advantages=advantages[part]))
        parts.append(logprobs[part].tolist())
        start += size
    expected = float(-(advantages * logprobs)[1::2].sum() / 4)
    assert run(rows, parts)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, 0.5),
        ([1, 1 / 3, 1 / 3, 1 / 3, 1 / 2, 1 / 2], 2 / 3),
        ([1 / 4, 1 / 4, 1 / 4, 1 / 4, 1 / 2, 1 / 2], 0.625),
    ],
    ids=["token mean", "sample mean", "prompt mean"],
)
def test_aggregation_is_a_matter_of_weights(weights, expected):
    """Group 0: rollouts [1] and [0, 0, 0]; group 1: [1, 1]. Divided by the sum of weights."""
    losses = [1, 0, 0, 0, 1, 1]
    rows = []
    documents = [(0, 1), (1, 4), (4, 6)]
    for start, stop in documents:
        given = {"advantages": [0, *losses[start:stop]]}
        if weights is not None:
            given["rl_weights"] = [0, *weights[start:stop]]
        rows.append(streams([stop - start + 1], [0] + [1] * (stop - start), **given))
    total, _ = run(rows, [[-1.0] * (stop - start + 1) for start, stop in documents])
    assert total == pytest.approx(expected)


def test_weights_below_one_in_total_are_not_blown_up():
    row = streams([2], [0, 1], advantages=[0, 1], rl_weights=[0, 0.25])
    assert run([row], [[0, -1]])[0] == pytest.approx(0.25)


def test_weight_zero_is_no_member():
    row = streams([3], [0, 1, 1], advantages=[0, 1, NAN], rl_weights=[0, 1, 0])
    total, (gradient,) = run([row], [[0, -1, NAN]])
    assert total == 1.0 and gradient == [0, -1, 0]


@pytest.mark.parametrize("bad", [-200.0, -INF, NAN])
def test_values_at_excluded_positions_change_nothing(bad):
    mask = [0, 0, 1, 1, 0, 0, 0]
    clean = streams([4, 3], mask, advantages=[0, 0, 1, -1, 0, 0, 0])
    dirty = streams(
        [4, 3],
        mask,
        advantages=[bad, bad, 1, -1, bad, bad, bad],
        inference_logprobs=[bad, bad, 0, 0, bad, bad, bad],
        temperatures=[bad, bad, 1, 1, bad, bad, bad],
        ref_logprobs=[bad, bad, 0, 0, bad, bad, bad],
    )
    lt = [-1, -1, -1, -2, -1, -1, -1]
    excluded = [bad, bad, -1, -2, bad, bad, bad]
    assert run([clean], [lt]) == run([dirty], [excluded])
    for row in (clean, dirty):
        means = TokenMeans()
        built = build_row(row, CPU)
        chosen = torch.tensor([-1.0, -2.0])
        loss = PlainLoss(PluginConfig(type="plain"))
        means.add_row(built, chosen, row_loss(built, chosen, loss, row.totals).components)
        assert reduce_means(LONELY, means.local()) == pytest.approx(
            {
                "entropy/all": -1.5,
                "seen/mean": 1.0,
                "mismatch_kl/all": (math.exp(-1) + math.exp(-2) + 1) / 2,
            }
        )


class _Lonely:
    size = 1


LONELY = _Lonely()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("inference_logprobs", NAN),
        ("inference_logprobs", -INF),
        ("advantages", NAN),
        ("advantages", INF),
        ("temperatures", 0.0),
        ("temperatures", NAN),
        ("rl_weights", NAN),
        ("ref_logprobs", NAN),
    ],
)
def test_unusable_value_at_a_trained_token_is_named(name, value):
    given = {"advantages": [0, 1, 1], "rl_weights": [0, 1, 1], "ref_logprobs": [0, 0, 0]}
    stream = np.array(given.get(name, [1, 1, 1]), np.float32)
    stream[2] = value
    with pytest.raises(RunError, match=name):
        build_row(streams([3], [0, 1, 1], **{**given, name: stream}), CPU)


def test_rl_tokens_without_advantages_are_refused():
    with pytest.raises(RunError, match="advantages: 1 tokens need this stream"):
        build_row(streams([2], [0, 1]), CPU)


def test_first_token_of_a_document_never_trains():
    row = streams([3, 2], [1, 1, 0, 1, 1], advantages=[1, 1, 1, 1, 1])
    assert row.scored.tolist() == [1, 4]
    assert row.totals.rl == 2


def test_loss_that_averages_by_itself_is_refused():
    row = streams([3], [0, 1, 1], advantages=[0, 1, 1])
    with pytest.raises(PluginError, match=r"broken: loss has shape \[\], expected \[2\]"):
        run([row], [[0, -1, -1]], MeanLoss(PluginConfig(type="broken")))


def test_ce_by_hand_beside_rl():
    row = streams([5], [0, 1, 1, 0, 0], advantages=[0, 1, 1, 0, 0], ce_weights=[0, 0, 0, 2.0, 1.0])
    total, (gradient,) = run([row], [[0, -1, -3, -0.5, -2]])
    assert total == pytest.approx((1 + 3) / 2 + (2 * 0.5 + 2) / 2)
    assert gradient == [0, -0.5, -0.5, -1.0, -0.5]


def test_ref_kl_by_hand():
    """-(lr - lt) * r per token, its gradient the same again; a drop of p by over 0.2 is left out."""
    lt, li, lr = math.log(0.3), math.log(0.2), math.log(0.6)
    dropped = (math.log(0.1), math.log(0.9), math.log(0.5))
    row = streams(
        [3],
        [0, 0, 0],
        ref_kl_weights=[0, 1, 1],
        inference_logprobs=[0, li, dropped[1]],
        ref_logprobs=[0, lr, dropped[2]],
    )
    total, (gradient,) = run([row], [[0, lt, dropped[0]]])
    expected = -(lr - lt) * (0.3 / 0.2) / 2
    assert total == pytest.approx(expected, rel=1e-5)
    assert gradient == pytest.approx([0, expected, 0], rel=1e-5)


@pytest.mark.parametrize(("lp", "ref"), [(-1.0, -2.0), (-2.0, -1.0)])
def test_ref_kl_pulls_towards_the_reference(lp, ref):
    row = streams(
        [2], [0, 0], ref_kl_weights=[0, 1], inference_logprobs=[0, lp], ref_logprobs=[0, ref]
    )
    _, (gradient,) = run([row], [[0, lp]])
    assert (lp - gradient[1] - lp) * (ref - lp) > 0


@pytest.mark.parametrize("gap", [0.0, 1.0, -1.0, 88.0, 100.0, 1000.0, -1000.0, 1e4])
def test_ratio_and_mismatch_are_finite_for_any_gap(gap):
    lt = torch.tensor([gap], requires_grad=True)
    li = torch.zeros(1)
    ratio = capped_ratio(lt, li, 1e4, torch.tensor([True]))
    (0.0 * ratio + ratio).sum().backward()
    assert torch.isfinite(ratio).all() and torch.isfinite(lt.grad).all()
    kl = mismatch_kl(lt.detach(), li)
    assert torch.isfinite(kl).all() and (kl >= 0).all()
    if gap == -1.0:
        assert kl.item() == pytest.approx(0.367879, abs=1e-6)
