"""The ceiling of episodes in flight: step responses to series of metrics, brakes, their metrics."""

import asyncio
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from orchestrator_world import make_stage, run_world
from pydantic import ValidationError

from prime_rl.configs.concurrency import ConcurrencyConfig
from prime_rl.orchestrator import concurrency_watcher
from prime_rl.orchestrator.admission import Admission
from prime_rl.orchestrator.concurrency import ConcurrencyController
from prime_rl.orchestrator.engine_load import EngineLoad, engine_load
from prime_rl.orchestrator.lag import EventLoopLag
from prime_rl.traces import read_metrics


def load(usage=0.0, running=100, waiting=0, evictions=0):
    return EngineLoad(running, waiting, usage, evictions)


class Run:
    """A controller with everything in use unless said otherwise, one poll per second."""

    def __init__(self, start=100, smallest=1, largest=1000):
        self.controller = ConcurrencyController(start=start, smallest=smallest, largest=largest)
        self.completed = 0
        self.now_s = 0.0

    def poll(self, found, *, ended=0, inflight=None, seconds=1.0):
        self.completed += ended
        self.now_s += seconds
        ceiling = self.controller.ceiling
        return self.controller.poll(
            found,
            inflight=ceiling if inflight is None else inflight,
            completed=self.completed,
            now_s=self.now_s,
        )

    def ceilings(self, found, polls, **rest):
        return [self.poll(found, **rest).ceiling for _ in range(polls)]


def test_the_ceiling_grows_by_a_quarter_per_turnover():
    run = Run()
    assert run.ceilings(load(0.3), 4, ended=50) == [100, 125, 125, 125]
    assert run.ceilings(load(0.3), 1, ended=50) == [157]  # 150 ended since the last growth


@pytest.mark.parametrize(
    ("usage", "ceiling"), [(0.6, 125), (0.7, 113), (0.75, 107), (0.8, 100), (0.89, 100)]
)
def test_growth_shrinks_between_the_limits_of_the_caches(usage, ceiling):
    assert Run().poll(load(usage), ended=100).ceiling == ceiling


def test_no_growth_when_the_ceiling_does_not_bind_or_something_queues():
    run = Run()
    assert run.poll(load(), ended=100, inflight=89).ceiling == 100
    assert run.poll(load(), ended=0).ceiling == 100, "the turnover was used up"
    assert run.poll(load(waiting=50), ended=100).ceiling == 100
    assert run.poll(load(waiting=49), ended=100).ceiling == 125


def test_full_caches_cut_back_to_their_share_and_cancel():
    run = Run()
    verdict = run.poll(load(0.95))
    assert verdict.ceiling == int(100 * 0.7 / 0.95) and verdict.cancels
    # 6 polls of cooling down, then again.
    assert run.ceilings(load(0.95), 7) == [73] * 6 + [int(73 * 0.7 / 0.95)]


def test_a_cut_counts_from_what_runs():
    assert Run(start=1000).poll(load(0.91), inflight=200).ceiling == int(200 * 0.7 / 0.91)


def test_evictions_cut_and_escalate():
    run = Run()
    assert run.poll(load(evictions=5)).ceiling == 100, "what was before is no news"
    verdict = run.poll(load(evictions=6))
    assert verdict.ceiling == 80 and verdict.cancels
    assert run.ceilings(load(evictions=6), 6) == [80] * 6
    assert run.poll(load(evictions=7)).ceiling == 40
    run.ceilings(load(evictions=7), 13)
    assert run.poll(load(evictions=8)).ceiling == 32, "long after, no escalation"
    assert run.ceilings(load(evictions=0), 7) == [32] * 7, "a restarted engine counts anew"
    assert run.poll(load(evictions=1)).cancels


def test_a_queue_trims_after_six_polls_without_cancelling():
    run = Run()
    run.ceilings(load(), 6)  # the start does not count
    assert run.ceilings(load(waiting=50), 6) == [100] * 5 + [90]
    assert not run.poll(load(waiting=50)).cancels
    assert run.ceilings(load(waiting=50), 6) == [90] * 5 + [81]
    assert run.ceilings(load(waiting=50), 3) + run.ceilings(load(waiting=49), 1) == [81] * 4
    assert run.ceilings(load(waiting=50), 5) == [81] * 5, "six in a row"


def test_the_queue_does_not_count_around_a_weight_update():
    run = Run()
    run.ceilings(load(), 6)
    run.ceilings(load(waiting=50), 5)
    run.controller.weights_updated()
    assert run.ceilings(load(waiting=50), 7) == [100] * 6 + [90]


def test_old_metrics_stop_growth_and_missing_ones_delay_it():
    run = Run()
    assert run.poll(load()).ceiling == 100
    assert run.poll(None, ended=100).ceiling == 100
    assert run.poll(load()).ceiling == 125, "the turnover was kept"
    run.ceilings(None, 16)
    assert run.poll(None, ended=1000).ceiling == 125
    assert run.poll(load()).ceiling == 125, "the turnover was dropped"


def test_the_ceiling_stays_between_its_bounds():
    run = Run(start=5000, smallest=16, largest=120)
    assert run.controller.ceiling == 120
    assert run.poll(load(), ended=5000).ceiling == 120
    assert run.poll(load(1.0), inflight=3).ceiling == 16


@given(
    st.lists(
        st.tuples(
            st.floats(0, 1),
            st.integers(0, 200),
            st.integers(0, 3),
            st.integers(0, 300),
            st.booleans(),
        ),
        max_size=80,
    )
)
@settings(max_examples=60, deadline=None)
def test_any_series_stays_in_bounds_and_says_why_it_moves(series):
    run, evictions = Run(start=50, smallest=8, largest=300), 0
    for usage, waiting, evicted, ended, is_there in series:
        evictions += evicted
        before = run.controller.ceiling
        found = load(usage, 100, waiting, evictions) if is_there else None
        verdict = run.poll(found, ended=ended)
        assert 8 <= verdict.ceiling <= 300 and verdict.ceiling == run.controller.ceiling
        assert verdict.reason or verdict.ceiling == before
        assert verdict.ceiling <= max(before * 1.25 + 1, before)


def test_a_closed_loop_settles_where_the_caches_are_well_used():
    """Each episode fills 1/400 of the cache; above the cache, engines evict."""
    run, evictions, trace = Run(start=10, largest=1000), 0, []
    for _ in range(300):
        ceiling = run.controller.ceiling
        evictions += max(0, ceiling - 400)
        run.poll(load(min(1.0, ceiling / 400), ceiling, 0, evictions), ended=ceiling)
        trace.append(run.controller.ceiling)
    assert evictions == 0
    assert 240 <= trace[-1] <= 330 and trace[-50:] == [trace[-1]] * 50


VLLM_PAGE = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="a \\" } b"} 2.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:num_preemptions_total{engine="0",model_name="m"} 7.0
vllm:num_preemptions_created{engine="0",model_name="m"} 1.7e+09
vllm:cache_config_info{block_size="16",cache_dtype="auto",num_gpu_blocks="100"} 1.0
not a sample
"""


def test_the_load_is_read_from_the_pages_of_all_engines():
    two = engine_load([VLLM_PAGE, VLLM_PAGE.replace("0.5", "0.75")])
    assert two == EngineLoad(14, 4, 0.75, 14, 3200)
    bare = engine_load(["vllm:num_requests_running 1\nvllm:num_requests_waiting 2\n"])
    assert bare == EngineLoad(1, 2, 0.0, 0.0, None)
    assert engine_load([VLLM_PAGE, "hello"]) is None
    unknown = VLLM_PAGE.replace('num_gpu_blocks="100"', 'num_gpu_blocks="None"')
    assert engine_load([unknown]).capacity_tokens is None


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def start_all(admission, most=10**6):
    """Start what may start now."""
    count = 0
    while count < most and not admission.wait_s():
        admission.started()
        count += 1
    return count


def test_growth_is_bounded_per_window_and_ends_give_places_back():
    clock = Clock()
    admission = Admission(clock, max_inflight=1000, largest_group=8, window_s=5.0)
    assert admission.growth == 100
    assert start_all(admission) == 100
    assert admission.wait_s() == pytest.approx(5.0)
    clock.now_s += 2.0
    for _ in range(30):
        admission.ended()
    assert start_all(admission) == 30
    clock.now_s += 3.0
    assert start_all(admission) == 100


def test_small_runs_and_large_groups_start_at_once():
    assert Admission(Clock(), max_inflight=128, window_s=5.0).growth == 64
    assert Admission(Clock(), max_inflight=128, largest_group=80, window_s=5.0).growth == 80
    off = Admission(Clock(), max_inflight=128)
    assert start_all(off, 500) == 500


@given(st.integers(1, 600), st.lists(st.floats(0, 10), max_size=40))
@settings(max_examples=50, deadline=None)
def test_no_minute_has_more_starts_than_the_rate_and_one_second_of_it(per_minute, pauses):
    clock = Clock()
    admission = Admission(clock, per_minute=per_minute)
    starts = []
    for pause in pauses:
        clock.now_s += pause
        starts += [clock.now_s] * start_all(admission, 10**5)
    for first in starts:
        inside = sum(first <= time_s < first + 60 for time_s in starts)
        assert inside <= per_minute + per_minute / 60 + 1


def test_a_rate_is_used_in_full():
    clock = Clock()
    admission = Admission(clock, per_minute=120)
    count = 0
    for _ in range(600):
        count += start_all(admission)
        clock.now_s += 0.1
    assert 118 <= count <= 123


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"max_inflight": 4, "min_inflight": 5}, "min_inflight 5 is above max_inflight 4"),
        ({"max_inflight": 4, "initial_inflight": 5}, "initial_inflight 5 is above max_inflight 4"),
        ({"initial_inflight": 4, "min_inflight": 5}, "initial_inflight 4 is below min_inflight 5"),
        ({"max_inflight": 0}, "greater than or equal to 1"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(section, text):
    with pytest.raises(ValidationError, match=text):
        ConcurrencyConfig.model_validate(section)


@pytest.mark.parametrize("name", ["initial_inflight", "max_inflight"])
def test_a_group_must_fit(name):
    with pytest.raises(ValidationError, match=f"concurrency.{name} 3 is below group_size 4"):
        make_stage(concurrency={name: 3})


@pytest.mark.parametrize(
    ("section", "fixed", "largest"),
    [
        ({}, 128, 1024),
        ({"adaptive": False}, 128, 128),
        ({"max_inflight": 300}, 300, 300),
        ({"adaptive": False, "initial_inflight": 40}, 40, 40),
        ({"initial_inflight": 40}, 40, 1024),
        ({"initial_inflight": 2000}, 2000, 2000),
    ],
)
def test_what_the_settings_leave_open_is_filled(section, fixed, largest):
    config = ConcurrencyConfig.model_validate(section)
    assert (config.fixed_inflight, config.largest_inflight) == (fixed, largest)


def page(running=0, waiting=0, usage=0.0, evictions=0, tokens=2048 * 6):
    return (
        f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\n"
        f"vllm:kv_cache_usage_perc {usage}\nvllm:num_preemptions_total {evictions}\n"
        f'vllm:cache_config_info{{block_size="1",num_gpu_blocks="{tokens}"}} 1\n'
    )


def test_a_run_starts_with_what_the_caches_hold_and_without_metrics_with_a_fixed_number(tmp_path):
    def first_row(folder, pages, **section):
        stage = make_stage(max_steps=2, concurrency=section)
        world = run_world(folder, stage, pages=pages)
        return read_metrics(world.paths.metrics / "orchestrator.jsonl")[0]

    assert first_row(tmp_path / "a", [page()])["concurrency/ceiling"] == 6
    two = first_row(tmp_path / "b", [page(), page()], initial_inflight=9)
    assert two["concurrency/ceiling"] == 9
    for number, pages in enumerate([None, ["<html>"]]):
        row = first_row(tmp_path / f"c{number}", pages)
        assert row["concurrency/ceiling"] == 128 and "concurrency/running" not in row
    off = first_row(tmp_path / "d", [page()], adaptive=False, max_inflight=20)
    assert off["concurrency/ceiling"] == 20


def test_the_lag_of_the_event_loop_is_measured():
    async def scenario():
        lag = EventLoopLag()
        measuring = asyncio.create_task(lag.run())
        await asyncio.sleep(0.05)
        time.sleep(0.1)  # noqa: ASYNC251 - this is the lag
        await asyncio.sleep(0.05)
        measuring.cancel()
        found = lag.take()
        assert found["event_loop_lag/max"] >= 0.08
        assert 0.01 <= found["event_loop_lag/mean"] < found["event_loop_lag/max"]
        assert lag.take() == {}

    asyncio.run(scenario())


def test_groups_cut_for_overload_are_drawn_again_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(concurrency_watcher, "POLL_S", 0.01)
    evictions = 0

    async def evict(orchestrator):
        nonlocal evictions
        while True:
            evictions += 1
            orchestrator._services.engines.pages = [page(evictions=evictions, tokens=2048 * 40)]
            await asyncio.sleep(0.01)

    stage = make_stage(max_steps=5, target_lag=3, concurrency={"max_inflight": 40})
    world = run_world(tmp_path, stage, pages=[page(tokens=2048 * 40)], during=evict, delay_s=0.15)
    rows = read_metrics(world.paths.metrics / "orchestrator.jsonl")
    assert sum(row.get("cancelled/overload", 0) for row in rows) > 0
    assert rows[-1]["concurrency/ceiling"] == 4, "never below a group"
    trained = sorted(number for numbers in world.trained_tasks().values() for number in numbers)
    assert trained == sorted([number for number in range(10)] * 4)
