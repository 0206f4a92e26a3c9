"""GRPO on groups worked out by hand."""

import math

import pytest

from prime_rl.algorithms.grpo import GRPO, GRPOConfig, OverlongConfig, overlong_penalty
from prime_rl.api import Branch, Episode, Group


def episode(reward, tokens=2, outcome="completed", input_tokens=3, turns=1, branches=1):
    made = [
        Branch("agent", [1, 2] + [3] * tokens, [False, False] + [True] * tokens, reward)
        for _ in range(branches)
    ]
    return Episode("e", outcome, reward, made, input_tokens, turns)


def grpo(**settings) -> GRPO:
    return GRPO(GRPOConfig(type="grpo", **settings))


def scores(algorithm, episodes):
    credits = algorithm.score_group(Group("words", "t", episodes))
    return [
        None if branches[0].advantages is None else branches[0].advantages[-1]
        for branches in credits
    ]


def test_reward_minus_group_mean():
    assert scores(grpo(), [episode(1.0), episode(0.0), episode(0.5)]) == [0.5, -0.5, 0.0]


def test_advantage_only_on_masked_tokens_of_every_branch():
    episodes = [episode(1.0, tokens=3, branches=2), episode(0.0)]
    credits = grpo().score_group(Group("words", "t", episodes))
    assert [credit.advantages for credit in credits[0]] == [[0, 0, 0.5, 0.5, 0.5]] * 2
    assert credits[1][0].advantages == [0, 0, -0.5, -0.5]
    assert credits[0][0].rl_weights is None


def test_equal_rewards_give_exactly_zero():
    assert scores(grpo(), [episode(0.1)] * 3) == [0.0] * 3


@pytest.mark.parametrize("outcome", ["error", "timeout", "cancelled"])
def test_failed_episodes_leave_before_the_baseline(outcome):
    episodes = [episode(1.0), episode(0.0), episode(0.0, outcome=outcome)]
    assert scores(grpo(), episodes) == [0.5, -0.5, None]
    assert scores(grpo(failed="drop_group"), episodes) == [None] * 3


def test_a_single_counting_episode_gives_no_credit():
    assert scores(grpo(), [episode(1.0), episode(0.0, outcome="error")]) == [None, None]
    assert scores(grpo(), [episode(1.0)]) == [None]
    assert scores(grpo(), [episode(0.0, outcome="error", branches=1)] * 2) == [None, None]


def test_truncation_is_a_setting():
    episodes = [episode(1.0), episode(0.0), episode(0.5, outcome="truncated")]
    assert scores(grpo(), episodes) == [0.5, -0.5, 0.0]
    third = 1 / 3
    assert scores(grpo(truncated="zero"), episodes) == pytest.approx([1 - third, -third, -third])
    assert scores(grpo(truncated="exclude"), episodes) == [0.5, -0.5, None]


def test_linear_length_penalty_is_taken_before_the_baseline():
    # mean reward 0.5; shares 0.25 * 2/4 + 0.1 * 3/6 + 0.1 * 1/2 = 0.225 and 0.45
    episodes = [
        episode(1.0, tokens=2, input_tokens=3, turns=1),
        episode(0.0, tokens=4, input_tokens=6, turns=2),
    ]
    first, second = 1.0 - 0.5 * 0.225, 0.0 - 0.5 * 0.45
    mean = (first + second) / 2
    algorithm = grpo(length_penalty={"type": "linear"})
    assert scores(algorithm, episodes) == pytest.approx([first - mean, second - mean])


def test_length_weighted_baseline_balances_the_tokens():
    episodes = [episode(1.0, tokens=1), episode(0.0, tokens=3)]
    # baseline (1 * 1 + 3 * 0) / 4 = 0.25
    found = scores(grpo(length_weighted_baseline=True), episodes)
    assert found == [0.75, -0.25]
    assert 1 * found[0] + 3 * found[1] == 0.0


@pytest.mark.parametrize("reward", [0.1, 0.3, 1 / 3, -0.7])
@pytest.mark.parametrize("lengths", [(1, 2, 4), (3, 7, 11), (5, 5, 6)])
def test_equal_rewards_are_no_signal_whatever_the_baseline(reward, lengths):
    episodes = [episode(reward, tokens=length) for length in lengths]
    for settings in ({}, {"length_weighted_baseline": True}):
        assert scores(grpo(**settings), episodes) == [0.0, 0.0, 0.0]


def test_tokens_without_a_signal_take_no_share_of_their_prompt():
    episodes = [episode(1.0, tokens=1), episode(0.5, tokens=50), episode(0.0, tokens=3)]
    credits = grpo(loss_aggregation="prompt").score_group(Group("words", "t", episodes))
    live = [credits[0][0], credits[2][0]]
    assert math.isclose(sum(sum(credit.rl_weights) for credit in live), 1.0)


def test_prompt_aggregation_makes_a_group_count_once():
    episodes = [episode(1.0, tokens=1), episode(0.0, tokens=3), episode(0.0, outcome="error")]
    algorithm = grpo(loss_aggregation="prompt")
    credits = algorithm.score_group(Group("words", "t", episodes))
    assert credits[0][0].rl_weights == [0, 0, 0.25]
    assert credits[1][0].rl_weights == [0, 0, 0.25, 0.25, 0.25]
    assert credits[2][0].rl_weights is None and credits[2][0].advantages is None
    total = sum(sum(c.rl_weights) for branches in credits[:2] for c in branches)
    assert math.isclose(total, 1.0)
    assert algorithm.requirements.loss_aggregation == "prompt"
    assert grpo().requirements.loss_aggregation == "token"


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(5, 0.0), (6, 0.0), (7, 0.25), (8, 0.5), (10, 1.0), (11, 1.0)]
)
def test_graded_overlong_rule(tokens, penalty):
    assert overlong_penalty(tokens, OverlongConfig(max_tokens=10, cache_tokens=4)) == penalty


def test_overlong_penalty_reaches_the_advantages():
    episodes = [episode(1.0, tokens=8), episode(1.0, tokens=2)]
    found = scores(grpo(overlong={"max_tokens": 10, "cache_tokens": 4}), episodes)
    assert found == [-0.25, 0.25]


def test_grpo_keeps_no_state():
    algorithm = grpo()
    assert algorithm.state_dict() == {}
    algorithm.load_state_dict({})
    with pytest.raises(ValueError, match="no state"):
        algorithm.load_state_dict({"baseline": 1})
