"""RAE on games worked out by hand; its baselines through a restart."""

import json

import pytest
from pydantic import ValidationError

from prime_rl.algorithms.rae import RAE, RAEConfig
from prime_rl.api import Branch, Episode, Group
from prime_rl.orchestrator.state import OrchestratorState
from prime_rl.testing.algorithm import AlgorithmConformance


class TestRAE(AlgorithmConformance):
    """The kit of its kind. A group without contrast still trains: the baseline is from before."""

    plugin_name = "rae"
    silent_without_contrast = False


def branch(agent, reward, trains=True):
    return Branch(agent, [1, 2, 3], [False, trains, trains], reward)


def game(outcome="completed", **rewards):
    """An episode with one branch per agent."""
    branches = [branch(agent, reward) for agent, reward in rewards.items()]
    return Episode("e", outcome, sum(rewards.values()) / len(rewards), branches)


def rae(**settings) -> RAE:
    return RAE(RAEConfig(**settings))


def play(algorithm, *episodes):
    """Advantages per episode and branch; None where a branch gets no credit."""
    credits = algorithm.score_group(Group("game", "t", episodes))
    return [
        [None if c.advantages is None else c.advantages[-1] for c in branches]
        for branches in credits
    ]


def baselines(algorithm):
    return algorithm.state_dict().get("baselines", {})


def test_each_agent_has_a_baseline_taken_before_it_moves():
    algorithm = rae()
    # b = 0: A = r. Then b = 0.05 * r.
    assert play(algorithm, game(first=1.0, second=-1.0)) == [[1.0, -1.0]]
    assert baselines(algorithm) == pytest.approx({"first": 0.05, "second": -0.05})
    # A = r - b; then b = 0.95 * 0.05 + 0.05 * 1 = 0.0975 and 0.95 * -0.05 + 0.05 * 0 = -0.0475
    assert play(algorithm, game(first=1.0, second=0.0)) == [pytest.approx([0.95, 0.05])]
    assert baselines(algorithm) == pytest.approx({"first": 0.0975, "second": -0.0475})


def test_a_group_is_scored_with_one_baseline_and_moves_it_once_per_episode():
    algorithm = rae(decay=0.5)
    play(algorithm, game(first=1.0))  # b = 0.5
    assert play(algorithm, game(first=1.0), game(first=0.0)) == [[0.5], [-0.5]]
    # 0.5^2 * 0.5 + (1 - 0.5^2) * 0.5
    assert baselines(algorithm) == {"first": 0.5}
    play(algorithm, game(first=1.0), game(first=1.0))
    # as two updates, one after the other: 0.5 -> 0.75 -> 0.875
    assert baselines(algorithm) == {"first": 0.875}


def test_order_in_a_group_changes_nothing():
    games = [game(first=0.0), game(first=1.0), game(first=0.3), game(second=0.1)]
    forward, backward = rae(), rae()
    assert play(forward, *games) == play(backward, *games[::-1])[::-1]
    assert forward.state_dict() == backward.state_dict()


def test_advantage_only_on_tokens_that_train():
    episode = Episode("e", "completed", 1.0, [branch("first", 1.0), branch("first", 1.0, False)])
    (credits,) = rae().score_group(Group("game", "t", [episode]))
    assert [credit.advantages for credit in credits] == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]


def test_an_agent_that_does_not_train_has_no_baseline():
    algorithm = rae()
    play(algorithm, Episode("e", "completed", 1.0, [branch("fixed", 1.0, trains=False)]))
    assert algorithm.state_dict() == {}


def test_branches_of_one_agent_count_as_one_reward():
    algorithm = rae(decay=0.5)
    forked = Episode("e", "completed", 1.0, [branch("first", 1.0), branch("first", 0.0)])
    assert play(algorithm, forked) == [[1.0, 0.0]]
    assert baselines(algorithm) == {"first": 0.25}  # 0.5 * 0 + 0.5 * mean(1, 0)


@pytest.mark.parametrize("outcome", ["error", "timeout", "cancelled"])
def test_failed_episodes_neither_train_nor_move_a_baseline(outcome):
    episodes = [game(first=1.0), game(outcome, first=-8.0)]
    algorithm = rae(decay=0.5)
    assert play(algorithm, *episodes) == [[1.0], [None]]
    assert baselines(algorithm) == {"first": 0.5}
    algorithm = rae(decay=0.5, failed="drop_group")
    assert play(algorithm, *episodes) == [[None], [None]]
    assert algorithm.state_dict() == {}


@pytest.mark.parametrize(
    ("truncated", "advantage", "baseline"),
    [("keep", 0.6, 0.3), ("zero", 0.0, 0.0), ("exclude", None, None)],
)
def test_truncation_is_a_setting(truncated, advantage, baseline):
    algorithm = rae(decay=0.5, truncated=truncated)
    assert play(algorithm, game("truncated", first=0.6)) == [[advantage]]
    assert baselines(algorithm).get("first") == baseline


def test_baselines_survive_a_restart():
    old = rae()
    play(old, game(first=1.0, second=-1.0), game(first=0.5, second=0.25))
    new = rae()
    new.load_state_dict(json.loads(json.dumps(old.state_dict())))
    assert new.state_dict() == old.state_dict() != {}
    for each in (old, new):
        play(each, game(first=0.1, second=0.2))
    assert new.state_dict() == old.state_dict()
    new.load_state_dict({})
    assert new.state_dict() == {} and play(new, game(first=1.0)) == [[1.0]]


def test_baselines_go_through_a_checkpoint_of_the_orchestrator(tmp_path):
    old, new = rae(), rae()
    play(old, game(first=1.0, second=-0.3))
    algorithms = {"games": old.state_dict()}
    OrchestratorState(1, source={}, algorithms=algorithms, counters={}, leftover=b"").write(
        tmp_path
    )
    new.load_state_dict(OrchestratorState.read(tmp_path).algorithms["games"])
    assert new.state_dict() == old.state_dict() != {}


def test_a_saved_state_is_not_the_live_one():
    algorithm = rae()
    play(algorithm, game(first=1.0))
    saved = algorithm.state_dict()
    play(algorithm, game(first=1.0))
    assert saved == {"baselines": {"first": pytest.approx(0.05)}}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"means": {}}, "'means'"),
        ({"baselines": [0.5]}, "expected a table of numbers"),
        ({"baselines": {"first": "0.5"}}, "agent 'first' is '0.5'"),
        ({"baselines": {"first": float("nan")}}, "expected a finite number"),
        ({"baselines": {"first": True}}, "expected a finite number"),
    ],
)
def test_a_state_that_is_none_is_refused(state, message):
    algorithm = rae()
    play(algorithm, game(first=1.0))
    before = algorithm.state_dict()
    with pytest.raises(ValueError, match=message):
        algorithm.load_state_dict(state)
    assert algorithm.state_dict() == before


@pytest.mark.parametrize("setting", [{"decay": 1.0}, {"decay": -0.1}, {"decay": True}, {"beta": 1}])
def test_unusable_settings_are_refused(setting):
    with pytest.raises(ValidationError):
        RAEConfig(**setting)
