"""10,000 episodes in virtual time under random cancellations, cuts, updates and evaluations."""

import asyncio
import random
import selectors
from collections import Counter

import pytest

from prime_rl.orchestrator.admission import Admission
from prime_rl.orchestrator.dispatch import Dispatcher, GroupInFlight
from prime_rl.orchestrator.episode import failed_result
from prime_rl.orchestrator.policy import Policy, Progress
from prime_rl.orchestrator.source import SourceShare, TrainSource
from prime_rl.orchestrator.watcher import WeightWatcher

SIZES = {"a": 16, "b": 5}
EVAL_SIZE = 3
EPISODES = 10_000


class _NoWaiting(selectors.SelectSelector):
    """Instead of waiting for a timer, the clock is put forward."""

    now_s = 0.0

    def select(self, timeout=None):
        assert timeout is not None, "nothing is due any more: somebody waits for ever"
        self.now_s += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only while everybody waits."""

    def __init__(self):
        self._virtual = _NoWaiting()
        super().__init__(self._virtual)

    def time(self):
        return self._virtual.now_s


def run_virtually(scenario):
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario)


class Ledger:
    """A runner and a sink that keep account of every episode."""

    def __init__(self, seed, reopen, close):
        self._draw = random.Random(seed)
        self._reopen = reopen
        self._close = close
        self.running = Counter()
        self.begun: list[tuple[str, int, int]] = []
        """(split, group, member) of every start."""
        self.generations = Counter()
        """How often a group was begun."""
        self.emitted = Counter()
        self.covered = Counter()
        self.reasons = Counter()
        self.most = 0
        self.eval_starved = 0
        """Training episodes begun while evaluation episodes waited."""
        self.eval_waiting = 0

    async def run(self, request):
        self.begun.append((request.split, request.group_id, request.member))
        self.generations[request.split, request.group_id] += request.member == 0
        if request.split == "eval":
            self.eval_waiting -= 1
        elif self.eval_waiting > 0:
            self.eval_starved += 1
        self.running[request.split] += 1
        self.most = max(self.most, self.running.total())
        try:
            await asyncio.sleep(self._draw.expovariate(0.2))
        except asyncio.CancelledError:
            if self._draw.random() < 0.5:  # some end all the same, as if the reply had been there
                raise
        finally:
            self.running[request.split] -= 1
        return failed_result(request, "error", "x")

    def finished(self, result):
        key = result.request.split, result.request.group_id
        self.emitted[key] += 1
        self._settle(key, result.request.source)

    def cancelled(self, cancellation):
        assert cancellation.count > 0, "a complete group has nothing to cancel"
        key = cancellation.split, cancellation.group_id
        self.covered[key] += cancellation.count
        self.reasons[cancellation.reason] += 1
        if cancellation.reason == "overload":
            assert cancellation.split == "train"
            self._reopen(cancellation.group_id)
        elif cancellation.split == "train":
            self._close(cancellation.group_id)

    def _settle(self, key, source):
        if key[0] == "train" and self.emitted[key] + self.covered[key] == (
            SIZES[source] * self.generations[key]
        ):
            self._close(key[1])


def make_source(seed):
    return TrainSource([SourceShare("a", 50, 2.0), SourceShare("b", 9, 1.0)], seed)


async def play(seed):
    draw = random.Random(seed)
    loop = asyncio.get_running_loop()
    source = make_source(seed)
    closed = Counter()

    def close(number):
        closed[number] += 1
        source.close(number)

    ledger = Ledger(seed, source.reopen, close)
    policy, progress = Policy(0, 0), Progress()
    dispatcher = Dispatcher(
        runner=ledger,
        sink=ledger,
        policy=policy,
        progress=progress,
        draw=source.draw,
        wants_more=lambda committed: committed < 400,
        group_sizes=SIZES,
        max_inflight=200,
        max_off_policy_steps=2,
        admission=Admission(loop.time, max_inflight=2000, window_s=5.0, per_minute=6000),
    )
    evaluations = 0
    dispatcher.pump()
    while len(ledger.begun) < EPISODES:
        await asyncio.sleep(draw.expovariate(0.5))
        action = draw.randrange(10)
        if action < 3:
            progress.step += 1
            policy.version = policy.published = progress.step - 1
            dispatcher.cancel_stale(policy.version)
        elif action < 6:
            dispatcher.ceiling = draw.randrange(20, 300)
            before = dispatcher.inflight
            dispatcher.cancel_youngest()
            await asyncio.sleep(0.001)
            assert dispatcher.inflight <= max(before, dispatcher.ceiling)
        elif action == 6:
            groups = [
                GroupInFlight("eval", "a", evaluations + n, n, EVAL_SIZE, policy.version, 1)
                for n in range(20)
            ]
            evaluations += 20
            ledger.eval_waiting += 20 * EVAL_SIZE
            dispatcher.enqueue_eval(groups)
        elif action == 7 and dispatcher._groups:
            reason = draw.choice(["stale", "overload"])
            group = draw.choice(list(dispatcher._groups.values()))
            if group.split == "train":
                dispatcher.cancel(group, reason)
        else:
            dispatcher.pump()
    if seed % 2:
        dispatcher.stop_training("finished")
    else:
        await dispatcher.stop()
    while dispatcher.inflight or dispatcher._groups:
        await asyncio.sleep(1.0)
    assert dispatcher.failure is None
    return ledger, source, closed, evaluations, loop.time()


def labels_of(seed, count):
    """Source of every draw: by the seed alone."""
    again = make_source(seed)
    return [again.draw().source for _ in range(count)]


@pytest.mark.parametrize("seed", range(4))
def test_every_episode_of_ten_thousand_is_accounted_for_once(seed):
    ledger, source, closed, evaluations, virtual_s = run_virtually(play(seed))
    assert len(ledger.begun) >= EPISODES and ledger.running.total() == 0
    assert {"stale", "overload"} <= set(ledger.reasons)
    labels = labels_of(source._seed, source._drawn)
    for key, generations in ledger.generations.items():
        size = EVAL_SIZE if key[0] == "eval" else SIZES[labels[key[1]]]
        total = ledger.emitted[key] + ledger.covered[key]
        assert total == size * generations, key
    members = Counter(ledger.begun)
    assert all(members[key] <= ledger.generations[key[:2]] for key in members)
    assert set(closed.values()) == {1}, "a draw closes once"
    assert evaluations >= 20 and ledger.eval_starved == 0
    assert virtual_s > 60


def test_the_ceiling_is_kept_and_the_oldest_group_outlives_every_cut():
    async def scenario():
        source = TrainSource([SourceShare("a", 50, 1.0)], 0)
        ledger = Ledger(0, source.reopen, source.close)
        dispatcher = Dispatcher(
            runner=ledger,
            sink=ledger,
            policy=Policy(0, 0),
            progress=Progress(),
            draw=source.draw,
            wants_more=lambda committed: True,
            group_sizes=SIZES,
            max_inflight=80,
            max_off_policy_steps=8,
        )
        dispatcher.pump()
        await asyncio.sleep(0)
        assert dispatcher.inflight == ledger.most == 80
        dispatcher.ceiling = 40
        assert dispatcher.cancel_youngest() == 3
        await asyncio.sleep(0.001)
        assert sorted(group for _, group in ledger.covered) == [2, 3, 4]
        assert dispatcher.inflight == 32 + 8, "the freed places went to group 2, drawn again"
        dispatcher.ceiling = 1
        dispatcher.cancel_youngest()
        await asyncio.sleep(0.001)
        assert dispatcher.inflight == 16 and set(dispatcher._groups) == {("train", 0)}
        await dispatcher.stop()

    run_virtually(scenario())


def test_what_a_frozen_model_plays_is_not_cut():
    async def scenario():
        source = TrainSource([SourceShare("a", 50, 1.0), SourceShare("b", 50, 1.0)], 1)
        ledger = Ledger(0, source.reopen, source.close)
        dispatcher = Dispatcher(
            runner=ledger,
            sink=ledger,
            policy=Policy(0, 0),
            progress=Progress(),
            draw=source.draw,
            wants_more=lambda committed: committed < 200,
            group_sizes=SIZES,
            max_inflight=300,
            max_off_policy_steps=8,
            never_stale=("b",),
        )
        dispatcher.pump()
        before = {group.source for group in dispatcher._groups.values()}
        dispatcher.ceiling = 1
        assert dispatcher.cancel_youngest() > 0
        left = [group.source for group in dispatcher._groups.values()]
        assert before == {"a", "b"} and left.count("a") == 1 and left.count("b") > 3
        await dispatcher.stop()

    run_virtually(scenario())


def test_stale_groups_end_before_the_engines_pause(tmp_path):
    events = []

    class Engines:
        async def pause(self):
            events.append("pause")

        async def update(self, version, directory):
            events.append("update")

        async def resume(self):
            events.append("resume")

    class Receiver:
        timeout_s = 1.0

        def acknowledge(self, version):
            return tmp_path

        def is_finished(self, version):
            return True

    async def scenario():
        source = TrainSource([SourceShare("b", 9, 1.0)], 0)

        class Sink(Ledger):
            def cancelled(self, cancellation):
                events.append(f"cancel {cancellation.group_id}")
                super().cancelled(cancellation)

        sink = Sink(0, source.reopen, source.close)
        policy, progress = Policy(0, 0), Progress()
        dispatcher = Dispatcher(
            runner=sink,
            sink=sink,
            policy=policy,
            progress=progress,
            draw=source.draw,
            wants_more=lambda committed: committed < 10,
            group_sizes=SIZES,
            max_inflight=10,
            max_off_policy_steps=0,
        )
        dispatcher.pump()
        progress.step = 2
        watcher = WeightWatcher(
            Receiver(),
            Engines(),
            policy,
            pauses_engines=True,
            may_take=lambda: True,
            on_pending=dispatcher.cancel_stale,
            on_published=lambda version: None,
            on_applied=lambda version: None,
        )
        await watcher.take(1)
        await dispatcher.stop()

    run_virtually(scenario())
    assert events[:5] == ["cancel 0", "cancel 1", "pause", "update", "resume"]
