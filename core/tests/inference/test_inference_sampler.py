"""Sampler: log-probabilities worked out by hand, supports, seeds, the drawn distribution."""

from __future__ import annotations

import math

import pytest
import torch

from prime_rl.inference.sampler import Sampler, _draw_on_device
from prime_rl.inference.sequence import SamplingParams, Sequence


def sequence(wants_kept: bool = True, **params: object) -> Sequence:
    chosen = SamplingParams(max_tokens=9, **params)  # type: ignore[arg-type]
    return Sequence("r", [0], 1, chosen, wants_kept=wants_kept)


def draw_until(logits: list[float], token: int, **params: object) -> tuple[float, list[int] | None]:
    """(log-probability, candidates) of `token`, from the first seed that draws it."""
    for seed in range(1000):
        drawn = Sampler().sample(torch.tensor([logits]), [sequence(seed=seed, **params)])
        if drawn.tokens == [token]:
            return drawn.logprobs[0], drawn.kept.get(0)
    raise AssertionError(f"token {token} was never drawn")


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, -0.126928), (0.7, -0.055844)])
def test_logprob_is_taken_at_the_sampling_temperature(temperature: float, expected: float) -> None:
    logprob, _ = draw_until([2.0, 0.0], 0, temperature=temperature)
    assert logprob == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("params", [{"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.2}])
def test_logprob_is_renormalised_over_the_candidates(params: dict[str, float]) -> None:
    # softmax(2, 1, 0) = 0.665, 0.245, 0.090: each filter keeps {0, 1}
    logprob, kept = draw_until([2.0, 1.0, 0.0], 1, **params)
    assert logprob == pytest.approx(-1.313262, abs=1e-6)
    assert kept == [0, 1]


def test_without_a_filter_the_whole_vocabulary_counts() -> None:
    logprob, kept = draw_until([2.0, 1.0, 0.0], 1)
    assert logprob == pytest.approx(-1.407606, abs=1e-6)
    assert kept is None


def test_a_tie_at_the_cut_is_recorded_as_it_was_used() -> None:
    for seed in range(20):
        drawn = Sampler().sample(torch.tensor([[1.0, 1.0, 0.0]]), [sequence(top_k=1, seed=seed)])
        assert drawn.kept[0] == drawn.tokens
        assert drawn.logprobs == [0.0]


def test_the_sampled_token_is_always_a_candidate_and_the_mask_carries_its_logprob() -> None:
    generator = torch.Generator().manual_seed(0)
    settings = [
        {"top_k": 3},
        {"top_p": 0.5},
        {"top_p": 1e-6},
        {"min_p": 0.3},
        {"top_k": 5, "top_p": 0.7, "min_p": 0.05, "temperature": 0.6},
        {"top_k": 999},
    ]
    for seed in range(30):
        # coarse logits, so that ties are common
        logits = (torch.randn(len(settings), 40, generator=generator) * 2).round()
        group = [sequence(seed=seed, **params) for params in settings]
        drawn = Sampler().sample(logits.clone(), group)
        for row, params in enumerate(settings):
            kept = drawn.kept.get(row, list(range(40)))
            scaled = logits[row].double() / params.get("temperature", 1.0)
            inside = torch.log_softmax(scaled[kept], dim=0)
            place = kept.index(drawn.tokens[row])
            assert drawn.logprobs[row] == pytest.approx(float(inside[place]), abs=1e-5)
            assert len(set(kept)) == len(kept)


def test_top_p_keeps_the_shortest_prefix_that_reaches_it() -> None:
    logits = [math.log(p) for p in (0.5, 0.25, 0.15, 0.1)]
    for top_p, expected in ((0.5, [0]), (0.51, [0, 1]), (0.75, [0, 1]), (0.91, [0, 1, 2, 3])):
        drawn = Sampler().sample(torch.tensor([logits]), [sequence(top_p=top_p)])
        assert drawn.kept.get(0, [0, 1, 2, 3]) == expected, top_p


def test_top_p_applies_to_what_top_k_left() -> None:
    logits = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    # among the first two: 0.571, 0.429, so 0.5 is reached by the first alone
    drawn = Sampler().sample(torch.tensor([logits]), [sequence(top_k=2, top_p=0.5)])
    assert drawn.kept[0] == [0]


def test_greedy_takes_the_likeliest_and_reports_the_plain_softmax() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    for seed in range(5):
        drawn = Sampler().sample(logits.clone(), [sequence(temperature=0.0, seed=seed)])
        assert drawn.tokens == [1]
        assert drawn.logprobs[0] == pytest.approx(float(torch.log_softmax(logits, 1)[0, 1]))


def test_a_sequence_draws_the_same_in_any_company() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))

    def run(rows: list[int]) -> dict[int, list[int]]:
        group = {row: sequence(seed=row, top_p=0.9 if row % 2 else 1.0) for row in rows}
        sampler = Sampler()
        drawn: dict[int, list[int]] = {row: [] for row in rows}
        for _ in range(20):
            step = sampler.sample(logits[rows].clone(), list(group.values()))
            for row, token in zip(rows, step.tokens, strict=True):
                drawn[row].append(token)
        return drawn

    together = run([0, 1, 2, 3])
    assert run([2]) == {2: together[2]}
    assert run([3, 1]) == {3: together[3], 1: together[1]}
    assert len(set(together[0])) > 5


@pytest.mark.parametrize("params", [{}, {"top_k": 4}, {"temperature": 0.5}])
def test_draws_follow_the_distribution(params: dict[str, float]) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0])
    runs = 4000
    group = [sequence(wants_kept=False, seed=seed, **params) for seed in range(runs)]
    drawn = Sampler().sample(logits.repeat(runs, 1), group)
    counts = torch.bincount(torch.tensor(drawn.tokens), minlength=5) / runs
    scaled = logits / params.get("temperature", 1.0)
    if "top_k" in params:
        scaled[4] = -math.inf
    expected = torch.softmax(scaled, dim=0)
    # three standard errors of a share of 4,000 draws are at most 0.024
    assert (counts - expected).abs().max() < 0.024
    assert counts[expected == 0].sum() == 0


def test_tokens_of_probability_zero_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf]])
    for seed in range(200):
        assert Sampler().sample(logits.clone(), [sequence(seed=seed)]).tokens == [1]


def test_stop_tokens_wait_for_the_least_length() -> None:
    params = {"min_tokens": 2, "stop_token_ids": frozenset({0})}
    young = sequence(**params)
    drawn = Sampler().sample(torch.tensor([[9.0, 0.0, 0.0]]), [young])
    assert drawn.tokens != [0]
    assert sorted(drawn.kept[0]) == [1, 2]
    assert drawn.logprobs[0] == pytest.approx(math.log(0.5))
    young.logprobs += [0.0, 0.0]
    assert Sampler().sample(torch.tensor([[9.0, 0.0, 0.0]]), [young]).tokens == [0]


def test_likeliest_candidates_come_with_their_logprobs() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [0.0, 2.0, 1.0]])
    group = [sequence(top_logprobs=2), sequence(top_logprobs=3, top_k=2)]
    tops = Sampler().sample(logits, group).tops
    assert [token for token, _ in tops[0]] == [1, 2]
    assert tops[0][0][1] == pytest.approx(-0.407606, abs=1e-6)
    assert [token for token, _ in tops[1]] == [1, 2]
    assert tops[1][1][1] == pytest.approx(-1.313262, abs=1e-6)


@pytest.mark.parametrize("params", [{}, {"temperature": 0.5}, {"temperature": 0.0}])
def test_host_and_device_arithmetic_agree(params: dict[str, float]) -> None:
    logits = 3 * torch.randn(40, 70, generator=torch.Generator().manual_seed(1))
    by_host = Sampler().sample(logits.clone(), [sequence(seed=n, **params) for n in range(40)])
    draws = [sequence(seed=n).draws.random() for n in range(40)]
    scaled = logits / (params.get("temperature") or 1.0)
    greedy = list(range(40)) if params.get("temperature") == 0.0 else []
    tokens, logprobs = _draw_on_device(scaled, draws, greedy)
    assert tokens == by_host.tokens
    assert logprobs == pytest.approx(by_host.logprobs, abs=1e-6)


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("shift", [0.0, 900.0, -900.0])
def test_huge_logits_are_sampled_all_the_same(shift: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    near = Sampler().sample(logits.clone(), [sequence(seed=3)])
    far = Sampler().sample(logits + shift, [sequence(seed=3)])
    assert far.tokens == near.tokens
    assert far.logprobs == pytest.approx(near.logprobs, abs=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_give_no_finite_logprob(bad: float) -> None:
    drawn = Sampler().sample(torch.tensor([[0.0, bad, 1.0]]), [sequence()])
    assert not math.isfinite(drawn.logprobs[0])
    assert 0 <= drawn.tokens[0] < 3
