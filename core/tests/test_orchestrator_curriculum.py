"""Samplers and gates: pools by mean reward, reproducible choices, rejected groups."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_world import make_stage, run_world
from pydantic import ValidationError

from prime_rl.configs.curriculum import AdvantageRangeConfig, DifficultyPoolConfig
from prime_rl.errors import CheckpointError, ConfigError, RunError
from prime_rl.orchestrator.curriculum import DifficultyPoolSampler, StandardSampler, is_rejected
from prime_rl.orchestrator.source import SourceShare, TrainSource
from prime_rl.orchestrator.state import OrchestratorState
from prime_rl.traces import read_metrics

KEYS = ["a", "b", "c", "d"]


def pools(keys=KEYS, **settings_):
    return DifficultyPoolSampler(DifficultyPoolConfig(**settings_), "words", keys)


def shares(sampler, draws=4000):
    counts = Counter(sampler.choose(number) for number in range(draws))
    return [counts[index] / draws for index in range(len(sampler._keys))]


def test_a_task_is_drawn_by_the_weight_of_its_pool():
    sampler = pools()
    sampler.observe(0, [0.0, 0.5])  # mean 0.25: hard, 0.2
    sampler.observe(1, [0.5])  # normal, 1
    sampler.observe(2, [1.0, 1.0, 0.5])  # 0.833: easy, 0.2
    assert sampler.metrics() == {"hard": 1, "normal": 1, "easy": 1, "unseen": 1}
    total = 0.2 + 1 + 0.2 + 1
    expected = [0.2 / total, 1 / total, 0.2 / total, 1 / total]
    assert shares(sampler) == pytest.approx(expected, abs=0.03)


def test_the_mean_runs_over_all_rewards_and_moves_the_task():
    sampler = pools(["a"])
    for reward, pool in ((0.0, "hard"), (1.0, "normal"), (1.0, "normal"), (1.0, "normal")):
        sampler.observe(0, [reward])
        assert sampler.metrics()[pool] == 1
    sampler.observe(0, [1.0])  # 4 of 5
    assert sampler.metrics()["easy"] == 1
    sampler.observe(0, [])  # a group without a scored episode says nothing
    assert sampler.metrics()["easy"] == 1


def test_rewards_beyond_the_last_bound_are_of_the_last_pool_and_below_zero_of_the_first():
    sampler = pools(["a", "b"])
    sampler.observe(0, [7.0])
    sampler.observe(1, [-3.0])
    assert sampler.metrics() == {"hard": 1, "normal": 0, "easy": 1, "unseen": 0}


def test_tasks_of_weight_zero_come_only_when_nothing_else_is_there():
    nothing = [{"name": "bad", "max_reward": 0.5, "weight": 0.0}]
    nothing.append({"name": "good", "max_reward": 1.0, "weight": 1.0})
    sampler = pools(["a", "b"], pools=nothing)
    sampler.observe(0, [0.0])
    sampler.observe(1, [1.0])
    assert shares(sampler, 200) == [0.0, 1.0]
    sampler.observe(1, [0.0])
    assert shares(sampler) == pytest.approx([0.5, 0.5], abs=0.03)


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-1, 2)), max_size=40))
@settings(max_examples=60, deadline=None)
def test_choices_depend_on_the_state_alone_not_on_how_it_came_about(events):
    sampler = pools()
    for index, reward in events:
        sampler.observe(index, [reward])
    resumed = pools()
    resumed.load_state_dict(sampler.state_dict())
    numbers = range(50)
    assert [resumed.choose(n) for n in numbers] == [sampler.choose(n) for n in numbers]
    assert resumed.metrics() == sampler.metrics()
    assert resumed.state_dict() == sampler.state_dict()


def test_the_seed_changes_the_choices_and_the_source_does_too():
    one, other = pools(), pools(seed=43)
    assert [one.choose(n) for n in range(40)] != [other.choose(n) for n in range(40)]
    renamed = DifficultyPoolSampler(DifficultyPoolConfig(), "other", KEYS)
    assert [one.choose(n) for n in range(40)] != [renamed.choose(n) for n in range(40)]


def test_equal_keys_and_changed_task_sets_are_refused():
    with pytest.raises(ConfigError, match="'a' occurs 2 times"):
        pools(["a", "b", "a"])
    sampler = pools()
    sampler.observe(3, [1.0])
    with pytest.raises(CheckpointError, match="task 'd', which source 'words' does not have"):
        pools(KEYS[:3]).load_state_dict(sampler.state_dict())


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"pools": [{"name": "a", "max_reward": 1, "weight": 1}] * 2}, "must ascend"),
        (
            {
                "pools": [
                    {"name": "a", "max_reward": 0.5, "weight": 1},
                    {"name": "a", "max_reward": 1, "weight": 1},
                ]
            },
            "names of their own",
        ),
        ({"pools": [{"name": "unseen", "max_reward": 1, "weight": 1}]}, "names of their own"),
        ({"pools": []}, "at least 1 item"),
        ({"pools": [{"name": "a", "max_reward": 1, "weight": -1}]}, "greater than or equal"),
        ({"unseen_weight": 0}, "no task would ever be drawn"),
    ],
)
def test_wrong_pools_are_refused(section, text):
    with pytest.raises(ValidationError, match=text):
        DifficultyPoolConfig.model_validate(section)


def test_the_standard_sampler_goes_round():
    sampler = StandardSampler(3)
    sampler.observe(0, [1.0])
    assert [sampler.choose(n) for n in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def make_source():
    sampler = DifficultyPoolSampler(DifficultyPoolConfig(), "a", [str(n) for n in range(20)])
    return TrainSource([SourceShare("a", 20, 1.0), SourceShare("b", 5, 1.0)], 0, {"a": sampler})


def play(source, draw, steps, log):
    """Draw, and finish draws in random order with random rewards."""
    flight = []
    for _ in range(steps):
        flight.append(source.draw())
        log.append(flight[-1])
        if draw.random() < 0.7:
            done = flight.pop(draw.randrange(len(flight)))
            source.samplers[done.source].observe(done.task_index, [draw.random()])
            source.close(done.number)


def test_a_resumed_source_draws_what_the_interrupted_one_would_have_drawn():
    source, draw, log = make_source(), random.Random(5), []
    play(source, draw, 60, log)
    state = source.state_dict()
    still_open = [entry[0] for entry in state["open"]]
    resumed = make_source()
    resumed.load_state_dict(state)
    again = [resumed.draw() for _ in still_open]
    assert [one.number for one in again] == still_open
    assert all(log[one.number] == one for one in again)
    assert [resumed.draw() for _ in range(30)] == [source.draw() for _ in range(30)]


def test_a_checkpoint_without_samplers_can_be_continued():
    source = TrainSource([SourceShare("a", 5, 1.0)], 0)
    source.draw()
    state = source.state_dict()
    del state["samplers"]
    resumed = TrainSource([SourceShare("a", 5, 1.0)], 0)
    resumed.load_state_dict(state)
    assert [resumed.draw().task_index for _ in range(2)] == [0, 1]


def test_a_draw_that_was_given_up_comes_again_first():
    source = TrainSource([SourceShare("a", 9, 1.0)], 0)
    drawn = [source.draw() for _ in range(4)]
    source.reopen(2)
    source.reopen(1)
    assert [source.draw() for _ in range(2)] == [drawn[1], drawn[2]]
    assert source.draw().number == 4
    assert [entry[0] for entry in source.state_dict()["open"]] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("advantages", "gate", "rejected"),
    [
        ((0.0, 0.0), {}, True),
        ((0.0, 0.1), {}, False),
        ((-0.1, 0.0), {}, False),
        ((-0.1, 0.1), {"reject_min": -0.1, "reject_max": 0.1}, True),
        ((-0.2, 0.1), {"reject_min": -0.1, "reject_max": 0.1}, False),
        (None, {"reject_min": -9, "reject_max": 9}, False),
    ],
)
def test_a_group_inside_the_range_is_rejected(advantages, gate, rejected):
    assert is_rejected([AdvantageRangeConfig(**gate)], advantages) == rejected


def test_every_gate_must_let_a_group_pass():
    near_zero = AdvantageRangeConfig(reject_min=-0.1, reject_max=0.1)
    large = AdvantageRangeConfig(reject_min=0.4, reject_max=2)
    assert is_rejected([near_zero, large], (0.5, 1.0))
    assert not is_rejected([near_zero, large], (0.0, 0.5))
    with pytest.raises(ValidationError, match=r"reject_min 1.0 is above reject_max 0.0"):
        AdvantageRangeConfig(reject_min=1)


def source_settings(**changes):
    return {
        "source": [{"name": "words", "env": {"taskset": {"id": "x"}}, "group_size": 4} | changes]
    }


def rows(world):
    return read_metrics(world.paths.metrics / "orchestrator.jsonl")


def near_equal(task, draw):
    """Half of the tasks give every episode nearly the same reward."""
    return 0.5 + (0.001 if task["number"] % 2 else 1.0) * draw.random() / 2


def test_rejected_groups_never_reach_the_trainer_and_are_backfilled(tmp_path):
    gates = [{"type": "advantage_range", "reject_min": -0.01, "reject_max": 0.01}]
    stage = make_stage(max_steps=4, train=source_settings(gates=gates))
    world = run_world(tmp_path, stage, replies={("train", "words"): near_equal})
    trained = [number for numbers in world.trained_tasks().values() for number in numbers]
    assert len(trained) == 4 * 8 and not any(number % 2 for number in trained)
    assert sum(row.get("curriculum/words/rejected", 0) for row in rows(world)) >= 3
    assert sum(row.get("wasted/rejected_tokens", 0) for row in rows(world)) >= 3 * 4 * 2


@pytest.mark.parametrize("constant", [True, False])
def test_a_gate_that_turns_everything_down_ends_the_run_with_the_reason(tmp_path, constant):
    gates = [{"reject_min": -9, "reject_max": 9}]
    stage = make_stage(
        max_steps=2,
        train=source_settings(gates=gates),
        max_empty_batches=2,
        constant_batch_size=constant,
    )
    with pytest.raises(RunError, match="groups turned down by a gate.*Narrow the range"):
        run_world(tmp_path, stage)


def test_the_pools_follow_the_rewards_of_a_run_and_survive_a_resume(tmp_path):
    def halves(task, draw):
        return draw.random() * 0.2 + (0.8 if task["number"] < 25 else 0.0)

    stage = make_stage(
        max_steps=6,
        train=source_settings(sampler={"type": "difficulty_pool"}),
        ckpt={"interval": 3},
    )
    reply = {("train", "words"): halves}
    world = run_world(tmp_path, stage, replies=reply)
    last = rows(world)[-1]
    names = ("hard", "normal", "easy", "unseen")
    assert sum(last[f"curriculum/words/{name}"] for name in names) == 50
    assert last["curriculum/words/hard"] > 0 and last["curriculum/words/easy"] > 0
    assert last["curriculum/words/normal"] == 0
    state = OrchestratorState.read(world.paths.checkpoint(3) / "orchestrator")
    seen = state.source["samplers"]["words"]["rewards"]
    assert 6 <= len(seen) <= last["curriculum/words/hard"] + last["curriculum/words/easy"]
    resumed = run_world(tmp_path, stage, replies=reply, resumed_after=3, state=state)
    first = rows(resumed)[6]
    assert first["step"] == 4 and first["curriculum/words/unseen"] <= 50 - len(seen)
