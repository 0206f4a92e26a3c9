"""echo: which answer tokens are learned, beside grpo's own credit."""

import random
import time

import pytest
from pydantic import ValidationError

from prime_rl.algorithms.echo import Echo, EchoConfig, SortedBranches, shared_length
from prime_rl.algorithms.grpo import GRPO, GRPOConfig
from prime_rl.api import Branch, Episode, Group
from prime_rl.testing.algorithm import AlgorithmConformance


class TestEcho(AlgorithmConformance):
    plugin_name = "echo"


T, U, A, X = "tool", "user", "assistant", ""


def branch(reward=0.0, ids=None, roles=None, mask=None):
    """question, reply, tool answer in its frame, reply, user answer, reply."""
    roles = roles if roles is not None else [X, T, U, X, A, X, T, T, X, A, U, A]
    mask = mask or [False] * 4 + [True, False, False, False, False, True, False, True]
    return Branch("agent", ids or list(range(len(mask))), mask, reward, roles=roles)


def episode(*branches, outcome="completed", reward=0.0):
    return Episode("e", outcome, reward, branches or [branch(reward)])


def ce(*episodes, **settings):
    credits = Echo(EchoConfig(**settings)).score_group(Group("tools", "t", episodes))
    return [[credit.ce_weights for credit in branches] for branches in credits]


def test_tool_content_after_the_first_reply_has_weight_alpha():
    # The tool message at place 1 belongs to the question; 5 and 8 are the template's.
    expected = [0.0] * 6 + [0.1, 0.1] + [0.0] * 4
    assert ce(episode()) == [[expected]]


def test_weights_by_role():
    expected = [0.0] * 6 + [0.5, 0.5, 0.0, 0.0, 2.0, 0.0]
    assert ce(episode(), alpha={"tool": 0.5, "user": 2.0, "assistant": 9.0}) == [[expected]]
    assert ce(episode(), alpha={"user": 0.0}) == [[None]]
    assert ce(episode(), alpha={}) == [[None]]


def test_an_assistant_message_that_nobody_sampled_is_an_answer_too():
    given = branch(roles=[U, A, A, A], mask=[False, True, False, True])
    assert ce(episode(given), alpha={"assistant": 1.0}) == [[[0.0, 0.0, 1.0, 0.0]]]


def test_without_roles_it_is_grpo():
    assert ce(episode(branch(roles=[]))) == [[None]]


def test_a_token_counts_once_in_an_episode():
    first = branch()
    # Same history up to the tool's second token, then another continuation.
    ids = [*range(7), 70, 8, 9, 10, 11]
    second = branch(ids=ids)
    other = branch(ids=[99, *range(1, 12)])
    whole = [0.0] * 6 + [0.1, 0.1] + [0.0] * 4
    rest = [0.0] * 7 + [0.1] + [0.0] * 4
    assert ce(episode(first, second, other)) == [[whole, rest, whole]]
    assert ce(episode(first, first)) == [[whole, None]]


def test_shared_length():
    assert shared_length(branch(ids=[1, 2, 3]), branch(ids=[1, 2, 4, 5])) == 2
    assert shared_length(branch(ids=[1, 2]), branch(ids=[1, 2, 3])) == 2


def test_the_longest_shared_beginning_is_that_with_every_earlier_branch():
    draw = random.Random(0)
    for _ in range(200):
        branches = [
            branch(ids=[draw.choice([1, 2, 256, 70000]) for _ in range(draw.randint(1, 6))])
            for _ in range(8)
        ]
        earlier = SortedBranches()
        for number, each in enumerate(branches):
            expected = max((shared_length(each, o) for o in branches[:number]), default=0)
            assert earlier.add(each) == expected


def test_many_rewritten_histories_take_time_by_their_tokens_not_by_their_pairs():
    """About 0.08 s; each with each takes 3 s."""
    length = 20_000
    branches = [branch(ids=[*range(length), 10**6 + number]) for number in range(64)]
    earlier = SortedBranches()
    started = time.process_time()
    assert [earlier.add(each) for each in branches] == [0] + [length] * 63
    assert time.process_time() - started < 1.0


def test_the_rl_part_is_grpo():
    rewards = [1.0, 0.0, 0.25]
    for settings in ({}, {"loss_aggregation": "prompt"}, {"length_weighted_baseline": True}):
        group = Group("tools", "t", [episode(reward=reward) for reward in rewards])
        ours = Echo(EchoConfig(**settings)).score_group(group)
        theirs = GRPO(GRPOConfig(type="grpo", **settings)).score_group(group)
        for (found,), (expected,) in zip(ours, theirs, strict=True):
            assert found.advantages == expected.advantages
            assert found.rl_weights == expected.rl_weights


@pytest.mark.parametrize("outcome", ["error", "timeout", "cancelled"])
def test_failed_episodes_teach_nothing(outcome):
    found = ce(episode(), episode(outcome=outcome))
    assert found[0] != [None] and found[1] == [None]
    assert ce(episode(), episode(outcome=outcome), failed="drop_group") == [[None], [None]]


def test_truncated_episodes_are_left_out_on_demand():
    cut = episode(outcome="truncated")
    assert ce(cut) != [[None]] and ce(cut, truncated="zero") != [[None]]
    assert ce(cut, truncated="exclude") == [[None]]


def test_order_of_episodes_changes_nothing():
    episodes = [episode(branch(roles=[])), episode(), episode(outcome="error")]
    assert ce(*episodes) == ce(*episodes[::-1])[::-1]


def test_what_it_asks_of_a_run():
    needs = Echo(EchoConfig(loss_aggregation="prompt")).requirements
    assert needs.roles and needs.components == {"rl", "ce"}
    assert needs.loss_aggregation == "prompt"


def test_negative_weights_are_refused():
    with pytest.raises(ValidationError):
        EchoConfig(alpha={"tool": -0.1})
