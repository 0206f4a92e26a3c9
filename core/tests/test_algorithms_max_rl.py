"""MaxRL on groups worked out by hand."""

import pytest
from pydantic import ValidationError

from prime_rl.algorithms.max_rl import MaxRL, MaxRLConfig
from prime_rl.api import Branch, Episode, Group
from prime_rl.testing.algorithm import AlgorithmConformance


class TestMaxRL(AlgorithmConformance):
    """The kit of its kind."""

    plugin_name = "max_rl"


def episode(reward, outcome="completed", tokens=2, branches=1):
    made = [
        Branch("agent", [1, 2] + [3] * tokens, [False, False] + [True] * tokens, reward)
        for _ in range(branches)
    ]
    return Episode("e", outcome, reward, made)


def scores(episodes, **settings):
    credits = MaxRL(MaxRLConfig(**settings)).score_group(Group("words", "t", episodes))
    return [
        None if branches[0].advantages is None else branches[0].advantages[-1]
        for branches in credits
    ]


def test_reward_minus_mean_over_mean():
    # mean 0.5: (1 - 0.5) / 0.5, (0 - 0.5) / 0.5, (0.5 - 0.5) / 0.5
    assert scores([episode(1.0), episode(0.0), episode(0.5)]) == [1.0, -1.0, 0.0]


def test_a_rare_success_weighs_more_than_a_frequent_one():
    # 1 of 4: 4 / 1 - 1 = 3; 2 of 4: 4 / 2 - 1 = 1; 4 of 4: 0
    for successes, advantage in ((1, 3.0), (2, 1.0), (4, 0.0)):
        rewards = [1.0] * successes + [0.0] * (4 - successes)
        found = scores([episode(reward) for reward in rewards])
        assert found == [advantage] * successes + [-1.0] * (4 - successes)
        assert sum(found) == 0.0


@pytest.mark.parametrize(
    "rewards",
    [
        [0.0, 0.0],
        [-1.0, -0.5],
        [1.0, -1.0],
        [1.0, -3.0],
        [0.1, 0.2, -0.3],  # sums to 5.6e-17
        [1e300, -1e300, 1e-300],
        [5e-324, 0.0],
    ],
)
def test_no_advantage_without_a_positive_mean(rewards):
    assert scores([episode(reward) for reward in rewards]) == [0.0] * len(rewards)


@pytest.mark.parametrize("reward", [0.1, 1e-300, 1e300])
def test_equal_rewards_give_exactly_zero(reward):
    assert scores([episode(reward)] * 3) == [0.0] * 3


@pytest.mark.parametrize("scale", [1e-300, 1e-9, 1.0, 1e9, 1e300])
def test_the_scale_of_rewards_does_not_matter(scale):
    found = scores([episode(scale), episode(0.0), episode(0.0), episode(0.0)])
    assert found == pytest.approx([3.0, -1.0, -1.0, -1.0])


def test_advantage_only_on_masked_tokens_of_every_branch():
    episodes = [episode(1.0, tokens=3, branches=2), episode(0.0)]
    credits = MaxRL(MaxRLConfig()).score_group(Group("words", "t", episodes))
    assert [credit.advantages for credit in credits[0]] == [[0, 0, 1.0, 1.0, 1.0]] * 2
    assert credits[1][0].advantages == [0, 0, -1.0, -1.0]
    assert credits[0][0].rl_weights is None


@pytest.mark.parametrize("outcome", ["error", "timeout", "cancelled"])
def test_failed_episodes_leave_before_the_mean(outcome):
    episodes = [episode(1.0), episode(0.0), episode(0.0, outcome=outcome)]
    assert scores(episodes) == [1.0, -1.0, None]
    assert scores(episodes, failed="drop_group") == [None] * 3


def test_truncation_is_a_setting():
    episodes = [episode(1.0), episode(0.0), episode(0.5, outcome="truncated")]
    assert scores(episodes) == [1.0, -1.0, 0.0]
    assert scores(episodes, truncated="zero") == pytest.approx([2.0, -1.0, -1.0])
    assert scores(episodes, truncated="exclude") == [1.0, -1.0, None]


def test_a_single_counting_episode_gives_no_credit():
    assert scores([episode(1.0)]) == [None]
    assert scores([episode(1.0), episode(0.0, outcome="error")]) == [None, None]


def test_it_keeps_no_state():
    algorithm = MaxRL(MaxRLConfig())
    algorithm.score_group(Group("words", "t", [episode(1.0), episode(0.0)]))
    assert algorithm.state_dict() == {}


def test_settings_of_other_algorithms_are_refused():
    for setting in ({"decay": 0.9}, {"length_penalty": None}, {"truncated": "mask"}):
        with pytest.raises(ValidationError):
            MaxRLConfig(**setting)
