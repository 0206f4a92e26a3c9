"""Episodes of several agents: rewards, tokens and variance belong to the agent that earned them."""

import dataclasses

import pytest

from prime_rl.algorithms.hierarchical_grpo import HierarchicalGRPO, HierarchicalGRPOConfig
from prime_rl.algorithms.rae import RAE, RAEConfig
from prime_rl.orchestrator.episode import EpisodeRequest
from prime_rl.orchestrator.group import score
from prime_rl.orchestrator.metrics import episode_metrics
from prime_rl.orchestrator.records import read_episode, stored_record


def trace(agent, reward, token, trainable=True, ok=True, stop="user_closed"):
    """Two prompt tokens and one sampled token, which says whose trace it is."""
    return {
        "id": f"{agent}-{token}",
        "ok": ok,
        "agent": {"name": agent, "trainable": trainable},
        "rewards": {"win": {"score": reward, "weight": 1.0}},
        "metrics": {f"moves_{agent}": 1.0},
        "info": {},
        "stop_condition": stop,
        "errors": [],
        "calls": [{"finish_reason": "stop", "usage": {"prompt_tokens": 2}, "error": None}],
        "nodes": [
            {
                "parent": None,
                "sampled": False,
                "message": {"role": "user", "content": "9"},
                "token_ids": [1, 2],
                "mask": [False, False],
                "logprobs": [],
            },
            {
                "parent": 0,
                "sampled": True,
                "message": {"role": "assistant", "content": "1"},
                "token_ids": [token],
                "mask": [True],
                "logprobs": [-0.5],
            },
        ],
    }


def read(member, *traces, ok=True):
    record = {"id": f"e{member}", "ok": ok, "is_timeout": False, "errors": [], "traces": traces}
    request = EpisodeRequest("train", "duel", 0, group_id=0, member=member, version=0, step=1)
    return read_episode(record, request, temperature=1.0, seq_len=64, end_version=0, duration_s=0.1)


def advantages(group):
    """Trace -> the advantages of its trainable tokens."""
    return {
        note.trace_id: [a for a in note.advantages if a is not None]
        for episode in group.episodes
        for note in episode.annotations
    }


def test_every_agent_keeps_its_own_reward_and_tokens():
    result = read(0, trace("first", 1.0, 11), trace("second", 0.25, 12))
    found = {each.agent: (each.reward, each.samples[0].token_ids) for each in result.traces}
    assert found == {"first": (1.0, [1, 2, 11]), "second": (0.25, [1, 2, 12])}
    assert result.reward == 0.625 and result.output_tokens == 2 and result.turns == 2
    assert result.metrics == {
        "moves_first": 1.0,
        "moves_second": 1.0,
        "win": 0.625,
        "reward/first": 1.0,
        "reward/second": 0.25,
    }
    assert [each["agent"] for each in stored_record(result, "k")["traces"]] == ["first", "second"]


def test_an_agent_that_does_not_train_gives_neither_samples_nor_reward():
    result = read(0, trace("solver", 1.0, 11), trace("judge", 0.0, 12, trainable=False))
    assert [(each.agent, len(each.samples)) for each in result.traces] == [
        ("solver", 1),
        ("judge", 0),
    ]
    assert result.reward == 1.0 and result.output_tokens == 1
    assert result.metrics == {"moves_solver": 1.0, "win": 1.0, "reward/solver": 1.0}
    assert "reward/agent" not in read(0, trace("agent", 1.0, 11)).metrics


def test_a_failed_agent_fails_the_episode_of_all():
    result = read(0, trace("first", 1.0, 11), trace("second", 0.0, 12, ok=False), ok=False)
    assert result.outcome == "error" and result.failed


def test_a_limit_of_one_agent_truncates_the_episode():
    result = read(0, trace("first", 1.0, 11), trace("second", 0.0, 12, stop="max_turns"))
    assert result.outcome == "truncated"


def test_variance_is_asked_agent_by_agent():
    won = [trace("first", 1.0, 11), trace("second", 0.0, 12)]
    lost = [trace("first", 0.0, 13), trace("second", 1.0, 14)]
    differ = score(RAE(RAEConfig()), [read(0, *won), read(1, *lost)], "k")
    assert {figures.figures.reward for figures in differ.episodes} == {0.5}
    assert differ.has_variance
    assert not score(RAE(RAEConfig()), [read(0, *won), read(1, *won)], "k").has_variance
    crashed = read(1, trace("first", 0.0, 13, ok=False), ok=False)
    assert not score(RAE(RAEConfig()), [read(0, *won), crashed], "k").has_variance


def test_each_agent_is_compared_with_its_own_kind():
    def episode(member, proposal, *solved):
        solvers = [trace("solver", r, 10 * member + n) for n, r in enumerate(solved, 1)]
        return read(member, trace("proposer", proposal, 10 * member), *solvers)

    results = [episode(1, 1.0, 1.0, 0.0), episode(2, 0.0, 1.0, 1.0)]
    group = score(HierarchicalGRPO(HierarchicalGRPOConfig()), results, "k")
    assert advantages(group) == {
        "proposer-10": [0.5],
        "solver-11": [0.5],
        "solver-12": [-0.5],
        "proposer-20": [-0.5],
    }


def test_training_metrics_name_the_agents():
    results = [
        read(0, trace("first", 1.0, 11), trace("second", 0.0, 12)),
        read(1, trace("first", 0.0, 13)),  # over before the second has spoken
    ]
    group = score(RAE(RAEConfig()), results, "k")
    found = episode_metrics("all", [episode.figures for episode in group.episodes])
    assert found["all/reward/first/mean"] == 0.5
    assert found["all/reward/second/mean"] == 0.0  # of the one game it took part in
    assert found["all/moves_first/mean"] == 1.0
    assert found["all/reward/mean"] == pytest.approx(0.25)
    failed = dataclasses.replace(group.episodes[0].figures, outcome="error")
    assert "all/moves_first/mean" not in episode_metrics("all", [failed])
