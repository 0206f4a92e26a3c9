"""Task order: deterministic, by ratio, resumable; selection of tasks."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prime_rl.configs.orchestrator import SelectConfig
from prime_rl.errors import CheckpointError, ConfigError
from prime_rl.orchestrator.source import Draw, SourceShare, TrainSource
from prime_rl.orchestrator.tasks import environment_settings, select


def make(seed=0, tasks=3):
    return TrainSource([SourceShare("a", tasks, 3.0), SourceShare("b", 5, 1.0)], seed)


def test_the_order_depends_on_the_seed_alone():
    first, second, other = make(1), make(1), make(2)
    order = [first.draw() for _ in range(50)]
    assert order == [second.draw() for _ in range(50)]
    assert order != [other.draw() for _ in range(50)]
    assert [draw.number for draw in order] == list(range(50))


def test_tasks_of_a_source_come_in_order_again_and_again():
    source = TrainSource([SourceShare("a", 3, 1.0)], 0)
    assert [source.draw().task_index for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_sources_share_by_ratio():
    source = make()
    labels = [source.draw().source for _ in range(2000)]
    assert labels.count("a") / 2000 == pytest.approx(0.75, abs=0.03)


def test_open_draws_come_first_after_a_resume():
    # Generation runs ahead: 0..3 drawn, 0 and 1 trained when the checkpoint is made.
    source = TrainSource([SourceShare("a", 8, 1.0)], 0)
    for _ in range(4):
        source.draw()
    source.close(0)
    source.close(1)
    resumed = TrainSource([SourceShare("a", 8, 1.0)], 0)
    resumed.load_state_dict(source.state_dict())
    assert [resumed.draw().task_index for _ in range(6)] == [2, 3, 4, 5, 6, 7]


def test_draws_whose_episodes_are_at_hand_do_not_come_again():
    source = TrainSource([SourceShare("a", 8, 1.0)], 0)
    for _ in range(3):
        source.draw()
    resumed = TrainSource([SourceShare("a", 8, 1.0)], 0)
    resumed.load_state_dict(source.state_dict(), kept={1})
    assert [resumed.draw().number for _ in range(3)] == [0, 2, 3]
    resumed.close(1)


def test_a_draw_closes_once():
    source = make()
    draw = source.draw()
    source.close(draw.number)
    with pytest.raises(KeyError):
        source.close(draw.number)


def test_changed_sources_or_tasks_are_refused():
    source = make()
    for _ in range(8):
        source.draw()
    state = source.state_dict()
    with pytest.raises(CheckpointError, match="made with the sources"):
        TrainSource([SourceShare("a", 3, 1.0)], 0).load_state_dict(state)
    with pytest.raises(CheckpointError, match="the task set has changed"):
        make(tasks=1).load_state_dict(state)


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(0, 5))
@settings(max_examples=100, deadline=None)
def test_kills_at_any_moment_change_neither_order_nor_number(actions, seed):
    """0, 1: draw; 2: finish the oldest open draw; 3: kill and resume from the last state."""
    source = make(seed)
    flight: list[Draw] = []
    finished: list[int] = []
    for action in actions:
        if action < 2:
            flight.append(source.draw())
        elif action == 2 and flight:
            draw = flight.pop(0)
            source.close(draw.number)
            finished.append(draw.number)
        elif action == 3:
            resumed = make(seed)
            resumed.load_state_dict(source.state_dict())
            source, flight = resumed, []
    flight += [source.draw() for _ in range(20)]
    finished += [draw.number for draw in flight]
    assert sorted(finished) == list(range(len(finished)))


def test_selection_applies_its_fields_in_order():
    assert select(5, SelectConfig()) == [0, 1, 2, 3, 4]
    assert select(5, SelectConfig(include=[4, 2, 0], exclude=[2])) == [4, 0]
    assert select(5, SelectConfig(skip=1, limit=2)) == [1, 2]
    shuffled = select(20, SelectConfig(shuffle=3))
    assert sorted(shuffled) == list(range(20)) and shuffled != list(range(20))
    assert select(20, SelectConfig(shuffle=3, skip=5, limit=4)) == shuffled[5:9]
    with pytest.raises(ConfigError, match="there is no task 5; the source has 5"):
        select(5, SelectConfig(include=[5]))
    with pytest.raises(ConfigError, match="leaves none of the 5 tasks"):
        select(5, SelectConfig(skip=5))


def test_programs_run_here_unless_the_recipe_says_otherwise():
    from prime_rl.configs.orchestrator import SourceConfig

    source = SourceConfig(env={"taskset": {"id": "x"}})
    assert environment_settings(source)["agent"] == {"runtime": {"type": "subprocess"}}
    hosted = SourceConfig(env={"taskset": {"id": "x"}, "agent": {"runtime": {"type": "docker"}}})
    assert environment_settings(hosted)["agent"] == {"runtime": {"type": "docker"}}
