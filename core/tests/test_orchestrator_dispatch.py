"""Emit everything: each dispatched episode reaches the sink once, or one cancellation covers it."""

import asyncio
import random
from collections import Counter

import pytest

from prime_rl.orchestrator.dispatch import Dispatcher, GroupInFlight
from prime_rl.orchestrator.episode import failed_result
from prime_rl.orchestrator.policy import Policy, Progress
from prime_rl.orchestrator.source import Draw

SIZES = {"a": 4, "b": 3}


class CountingSink:
    def __init__(self):
        self.results = []
        self.cancellations = []

    def finished(self, result):
        self.results.append(result)

    def cancelled(self, cancellation):
        self.cancellations.append(cancellation)


class RandomRunner:
    """Episodes that take a random number of turns of the event loop."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.started = Counter()
        self.running = 0
        self.most_running = 0

    async def run(self, request):
        self.started[request.split, request.group_id] += 1
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            for _ in range(self.draw.randrange(12)):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        return failed_result(request, "error", "x")


def make(runner, sink, *, groups=40, inflight=7, bound=1):
    policy, progress = Policy(0, 0), Progress()
    numbers = iter(range(10**6))

    def draw():
        number = next(numbers)
        return Draw(number, "ab"[number % 2], number)

    dispatcher = Dispatcher(
        runner=runner,
        sink=sink,
        policy=policy,
        progress=progress,
        draw=draw,
        wants_more=lambda committed: len(set(runner.started)) + committed // 4 < groups,
        group_sizes=SIZES,
        max_inflight=inflight,
        max_off_policy_steps=bound,
    )
    return dispatcher, policy, progress


def eval_groups(count, first=0):
    return [
        GroupInFlight("eval", "a", first + n, n, size=2, version=0, step=1) for n in range(count)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_random_cancellations_lose_and_double_nothing(seed):
    async def scenario():
        draw = random.Random(1000 + seed)
        runner, sink = RandomRunner(seed), CountingSink()
        dispatcher, policy, progress = make(runner, sink)
        dispatcher.enqueue_eval(eval_groups(3))
        for _ in range(60):
            for _ in range(draw.randrange(5)):
                await asyncio.sleep(0)
            action = draw.randrange(5)
            if action == 0:
                progress.step += 1
                policy.version = policy.published = progress.step - 1
                dispatcher.cancel_stale(policy.version)
            elif action == 1 and dispatcher._groups:
                dispatcher.cancel(draw.choice(list(dispatcher._groups.values())), "stale")
            elif action == 2:
                dispatcher.enqueue_eval(eval_groups(1, first=100 + progress.step * 10))
                progress.step += 1
            else:
                dispatcher.pump()
        if seed % 2:
            dispatcher.stop_training("finished")
        else:
            await dispatcher.stop()
        while dispatcher.inflight:
            await asyncio.sleep(0)
        assert dispatcher.failure is None
        return runner, sink

    runner, sink = asyncio.run(scenario())
    emitted = Counter((r.request.split, r.request.group_id) for r in sink.results)
    members = [(r.request.split, r.request.group_id, r.request.member) for r in sink.results]
    assert len(members) == len(set(members))
    cancelled = {(c.split, c.group_id): c for c in sink.cancellations}
    assert len(cancelled) == len(sink.cancellations)
    for key in runner.started:
        size = 2 if key[0] == "eval" else SIZES["ab"[key[1] % 2]]
        covered = cancelled[key].count if key in cancelled else 0
        assert emitted[key] + covered == size, key
    assert runner.most_running <= 7 and runner.running == 0


def test_concurrency_is_bounded_and_used():
    async def scenario():
        runner, sink = RandomRunner(0), CountingSink()
        dispatcher, _, _ = make(runner, sink, groups=12, inflight=5)
        dispatcher.pump()
        assert dispatcher.inflight == 5
        while dispatcher.inflight:
            await asyncio.sleep(0)
        return runner

    assert asyncio.run(scenario()).most_running == 5


def test_evaluation_comes_before_further_training():
    async def scenario():
        runner, sink = RandomRunner(0), CountingSink()
        dispatcher, _, _ = make(runner, sink, inflight=4)
        dispatcher.enqueue_eval(eval_groups(2))
        first = set(runner.started)
        await asyncio.sleep(0)
        started = set(runner.started)
        await dispatcher.stop()
        return first, started

    _, started = asyncio.run(scenario())
    assert started == {("eval", 0), ("eval", 1)}


def test_members_share_the_version_of_the_first():
    async def scenario():
        runner, sink = RandomRunner(3), CountingSink()
        dispatcher, policy, _ = make(runner, sink, groups=8, inflight=1)
        dispatcher.pump()
        while dispatcher.inflight:
            policy.version += 1
            await asyncio.sleep(0)
        return sink

    groups: dict[int, set[int]] = {}
    for result in asyncio.run(scenario()).results:
        groups.setdefault(result.request.group_id, set()).add(result.request.version)
    assert len(groups) > 3 and all(len(versions) == 1 for versions in groups.values())


def test_only_groups_beyond_the_bound_are_cancelled():
    async def scenario():
        runner, sink = RandomRunner(0), CountingSink()
        dispatcher, policy, progress = make(runner, sink, inflight=8, bound=1)
        dispatcher.pump()
        progress.step = 2
        assert dispatcher.cancel_stale(1) == 0
        assert dispatcher.cancel_stale(2) == 3
        assert {c.reason for c in sink.cancellations} == {"stale"}
        await dispatcher.stop()

    asyncio.run(scenario())


def test_a_fault_of_ours_is_kept_for_the_loop():
    class BrokenSink(CountingSink):
        def finished(self, result):
            raise ZeroDivisionError

    async def scenario():
        dispatcher, _, _ = make(RandomRunner(0), BrokenSink(), groups=3)
        dispatcher.pump()
        while dispatcher.inflight:
            await asyncio.sleep(0)
        return dispatcher.failure

    assert isinstance(asyncio.run(scenario()), ZeroDivisionError)
