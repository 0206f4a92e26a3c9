"""hierarchical_grpo on proposer-solver episodes worked out by hand."""

import random

import pytest
from pydantic import ValidationError

from prime_rl.algorithms.grpo import GRPO, GRPOConfig
from prime_rl.algorithms.hierarchical_grpo import HierarchicalGRPO, HierarchicalGRPOConfig
from prime_rl.api import Branch, Episode, Group
from prime_rl.testing.algorithm import AlgorithmConformance


class TestHierarchicalGRPO(AlgorithmConformance):
    plugin_name = "hierarchical_grpo"


def episode(proposer, solvers, outcome="completed"):
    """One proposer's trace and one per solver."""
    rewards = [("proposer", proposer), *(("solver", reward) for reward in solvers)]
    branches = [
        Branch(agent, [1, 2, 3], [False, True, True], reward, trace=number)
        for number, (agent, reward) in enumerate(rewards)
    ]
    mean = sum(reward for _, reward in rewards) / len(rewards)
    return Episode("e", outcome, mean, branches)


def advantages(*episodes, **settings):
    algorithm = HierarchicalGRPO(HierarchicalGRPOConfig(**settings))
    return [
        [None if credit.advantages is None else credit.advantages[-1] for credit in branches]
        for branches in algorithm.score_group(Group("proofs", "t", episodes))
    ]


def test_solvers_inside_their_episode_proposers_across_the_group():
    # proposers: mean(1, 0) = 0.5. First episode's solvers: mean 0.5; second's: mean 0.25.
    found = advantages(episode(1.0, [1.0, 0.0]), episode(0.0, [1.0, 0.0, 0.0, 0.0]))
    assert found == [[0.5, 0.5, -0.5], [-0.5, 0.75, -0.25, -0.25, -0.25]]


def test_only_sampled_tokens_get_an_advantage():
    algorithm = HierarchicalGRPO(HierarchicalGRPOConfig())
    (branches, _) = algorithm.score_group(
        Group("proofs", "t", [episode(1.0, [1.0, 0.0]), episode(0.0, [0.0, 0.0])])
    )
    assert [credit.advantages for credit in branches] == [
        [0.0, 0.5, 0.5],
        [0.0, 0.5, 0.5],
        [0.0, -0.5, -0.5],
    ]


def test_an_agent_alone_in_its_scope_gets_no_credit():
    assert advantages(episode(1.0, [1.0])) == [[None, None]]
    assert advantages(episode(1.0, [1.0]), episode(0.0, [0.0])) == [[0.5, None], [-0.5, None]]


def test_which_agents_are_compared_inside_is_a_setting():
    episodes = [episode(1.0, [1.0, 0.0]), episode(0.0, [0.0, 0.0])]
    # all four solvers of the group: mean 0.25
    assert advantages(*episodes, episode_agents=["nobody"]) == [
        [0.5, 0.75, -0.25],
        [-0.5, -0.25, -0.25],
    ]
    with pytest.raises(ValidationError):
        HierarchicalGRPOConfig(episode_agents=[])


def test_a_trace_counts_once_however_often_its_history_was_rewritten():
    branches = [
        Branch("solver", [1, 2], [False, True], 1.0, trace=0),
        Branch("solver", [1, 3], [False, True], 1.0, trace=0),
        Branch("solver", [1, 4], [False, True], 0.0, trace=1),
    ]
    # mean(1, 0), not mean(1, 1, 0)
    assert advantages(Episode("e", "completed", 0.5, branches)) == [[0.5, 0.5, -0.5]]


def test_traces_that_do_not_train_move_no_baseline():
    fixed = Branch("solver", [1, 2], [False, False], 9.0, trace=3)
    with_fixed = episode(0.0, [1.0, 0.0])
    with_fixed = Episode("e", "completed", 0.0, [*with_fixed.branches, fixed])
    assert advantages(with_fixed)[0][1:3] == [0.5, -0.5]


@pytest.mark.parametrize("outcome", ["error", "timeout", "cancelled"])
def test_failed_episodes_leave_before_the_baselines(outcome):
    episodes = [episode(1.0, [1.0, 0.0]), episode(0.0, [0.0, 0.0]), episode(9.0, [9.0], outcome)]
    found = advantages(*episodes)
    assert found[:2] == advantages(*episodes[:2]) and found[2] == [None, None]
    assert advantages(*episodes, failed="drop_group") == [[None] * 3, [None] * 3, [None] * 2]


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [("keep", [-0.25, 0.5, -0.5]), ("zero", [-0.5, 0.0, 0.0]), ("exclude", [None] * 3)],
)
def test_truncation_is_a_setting(truncated, expected):
    episodes = [episode(1.0, [1.0, 0.0]), episode(0.5, [1.0, 0.0], "truncated")]
    assert advantages(*episodes, truncated=truncated)[1] == expected


def test_one_agent_per_episode_is_grpo():
    draw = random.Random(0)
    episodes = [
        Episode("e", "completed", r, [Branch("agent", [1, 2], [False, True], r)])
        for r in (draw.random() for _ in range(6))
    ]
    credits = GRPO(GRPOConfig(type="grpo")).score_group(Group("words", "t", episodes))
    expected = [branch.advantages[-1] for (branch,) in credits]
    assert [found for (found,) in advantages(*episodes)] == pytest.approx(expected)


def test_order_of_episodes_and_traces_changes_nothing():
    draw = random.Random(1)
    episodes = [episode(draw.random(), [draw.random() for _ in range(4)]) for _ in range(5)]
    expected = advantages(*episodes)
    order = list(range(5))
    for _ in range(10):
        draw.shuffle(order)
        found = advantages(*[episodes[place] for place in order])
        assert found == [expected[place] for place in order]


def test_advantages_of_each_scope_add_up_to_zero():
    draw = random.Random(2)
    episodes = [episode(draw.random(), [draw.random() for _ in range(3)]) for _ in range(4)]
    found = advantages(*episodes)
    assert sum(row[0] for row in found) == pytest.approx(0.0)
    for row in found:
        assert sum(row[1:]) == pytest.approx(0.0)
