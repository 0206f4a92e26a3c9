"""Every installed loss inside the trainer: packing, splits of the step and masked values change nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from prime_rl.api import Loss
from prime_rl.plugins import scan
from prime_rl.trainer.batch import build_row
from prime_rl.trainer.loss import row_loss
from prime_rl.trainer.streams import Streams, Totals

LOSSES = [
    record.name
    for record in scan().records
    if record.kind == "loss" and record.distribution.startswith("prime-rl-loss-")
]
LENGTHS = (5, 3, 6, 2)
SPLITS = ([[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 1], [2, 0]], [[2, 3], [0], [1]])
"""Documents of every row of a step."""
BAD = (float("nan"), float("inf"), -float("inf"), -1e4)


def make_loss(name: str) -> Loss:
    """The loss with its defaults."""
    registry = scan()
    loss = registry.load("loss", name)(registry.config_class("loss", name)())
    assert isinstance(loss, Loss)
    return loss


def documents() -> list[dict[str, np.ndarray]]:
    """Random documents; the first tokens of each are its prompt. Ratios reach beyond every bound."""
    draw = np.random.default_rng(0)
    return [
        {
            "mask": np.arange(length) > length // 3,
            "inference_logprobs": (-0.02 - 3 * draw.random(length)).astype(np.float32),
            "advantages": draw.standard_normal(length).astype(np.float32),
            "logprobs": (-0.02 - 3 * draw.random(length)).astype(np.float32),
        }
        for length in LENGTHS
    ]


def step(
    loss: Loss, parts: list[dict[str, np.ndarray]], rows: list[list[int]], masked: float = 0.0
) -> tuple[float, list[np.ndarray]]:
    """(loss, gradient per document) of one step; `masked` stands wherever nothing trains."""

    def together(row: list[int], name: str) -> np.ndarray:
        values = [np.where(parts[one]["mask"], parts[one][name], masked) for one in row]
        return np.concatenate(values).astype(np.float32)

    built = [
        Streams(
            input_ids=np.zeros(sum(len(parts[one]["mask"]) for one in row), np.int32),
            lengths=tuple(len(parts[one]["mask"]) for one in row),
            loss_mask=np.concatenate([parts[one]["mask"] for one in row]),
            temperatures=np.ones(sum(len(parts[one]["mask"]) for one in row), np.float32),
            inference_logprobs=together(row, "inference_logprobs"),
            advantages=together(row, "advantages"),
        )
        for row in rows
    ]
    totals = sum((row.totals for row in built), Totals())
    value, gradients = 0.0, {}
    for row, streams in zip(rows, built, strict=True):
        leaf = torch.from_numpy(together(row, "logprobs")).requires_grad_()
        chosen = leaf[torch.from_numpy(streams.scored)]
        total = row_loss(build_row(streams, torch.device("cpu")), chosen, loss, totals).total
        total.backward()
        assert leaf.grad is not None
        value += total.item()
        pieces = leaf.grad.split([len(parts[one]["mask"]) for one in row])
        gradients |= {one: piece.numpy() for one, piece in zip(row, pieces, strict=True)}
    return value, [gradients[one] for one in range(len(parts))]


def assert_same(found: tuple[float, list[np.ndarray]], expected: tuple[float, list[np.ndarray]]):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    for ours, theirs in zip(found[1], expected[1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-8)


def test_all_four_are_here():
    assert {"ipo", "icepop", "ppo", "cispo"} <= set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_packing_and_splits_of_the_step_change_nothing(name):
    loss = make_loss(name)
    expected = step(loss, documents(), SPLITS[0])
    assert any(gradient.any() for gradient in expected[1])
    for rows in SPLITS[1:]:
        assert_same(step(loss, documents(), rows), expected)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", LOSSES)
def test_what_stands_at_masked_positions_does_not_matter(name, bad):
    loss = make_loss(name)
    assert_same(step(loss, documents(), SPLITS[0], masked=bad), step(loss, documents(), SPLITS[0]))


@pytest.mark.parametrize("bad", [0.0, *BAD])
@pytest.mark.parametrize("name", LOSSES)
def test_a_step_in_which_nothing_trains_is_exactly_zero(name, bad):
    parts = [{**part, "mask": np.zeros_like(part["mask"])} for part in documents()]
    value, gradients = step(make_loss(name), parts, SPLITS[2], masked=bad)
    assert value == 0.0
    assert all((gradient == 0.0).all() for gradient in gradients)
