"""Pulling and converting batches: order, failures of the other side, the background thread."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import pytest
import torch

from prime_rl.batches.opening import open_batch_client, open_batch_server
from prime_rl.configs.paths import StagePaths
from prime_rl.errors import RunError
from prime_rl.trainer.feed import Feed, pulled_batches
from prime_rl.trainer.prefetch import Prefetch
from prime_rl.wire import BatchHeader, MicroBatch, RankBatch

CPU = torch.device("cpu")


def rank_batch(step, token, rows=2, **changes):
    def floats(*values):
        return np.asarray(values, "<f4").tobytes()

    row = {
        "input_ids": np.asarray([0, token, token], "<i4").tobytes(),
        "loss_mask": bytes([0, 1, 1]),
        "inference_logprobs": floats(0, -1, -1),
        "temperatures": floats(1, 1, 1),
        "lengths": [3],
        "env_names": ["a"],
        "document_envs": [0],
        "trace_ids": [""],
        "branch_indices": [-1],
        "advantages": floats(0, 1, 1),
        **changes,
    }
    return RankBatch(BatchHeader(step, step - 1), [MicroBatch(**row) for _ in range(rows)])


def send(server, *batches):
    for batch in batches:
        asyncio.run(server.send(batch.header.step, [batch]))


def feed_from(paths, kind, last_step, depth, timeout_s=20.0):
    client = open_batch_client(kind, paths, 0)
    return Feed(pulled_batches(client, 1, last_step, timeout_s), CPU, depth)


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
@pytest.mark.parametrize("depth", [0, 1, 3])
def test_rows_come_step_after_step(tmp_path, kind, depth):
    paths = StagePaths(tmp_path)
    server = open_batch_server(kind, paths, 1)
    steps = [rank_batch(step, token=10 + step) for step in (1, 2, 3)]
    sender = threading.Thread(target=send, args=(server, *steps))
    sender.start()
    feed = feed_from(paths, kind, 3, depth)
    for step in (1, 2, 3):
        batch = feed.next_batch()
        assert (batch.step, batch.count, batch.totals.rl) == (step, 2, 4)
        assert [row.targets.tolist() for row in batch.rows] == [[10 + step] * 2] * 2
    sender.join()
    feed.close()
    server.close()


def test_reason_of_the_orchestrator_is_told(tmp_path):
    paths = StagePaths(tmp_path)
    server = open_batch_server("filesystem", paths, 1)
    send(server, rank_batch(1, 5))
    server.close("ten rounds of groups carried no signal")
    feed = feed_from(paths, "filesystem", 5, 1)
    list(feed.next_batch().rows)
    with pytest.raises(RunError, match="before the batch of step 2: ten rounds of groups"):
        feed.next_batch()


@pytest.mark.parametrize("kind", ["filesystem", "zmq"])
def test_nobody_there_is_an_error_in_time(tmp_path, kind):
    started = time.monotonic()
    with pytest.raises(RunError, match="no batch for step 1.*is the orchestrator alive"):
        feed_from(StagePaths(tmp_path), kind, 5, 1, timeout_s=0.3).next_batch()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("batch", "named"),
    [
        (rank_batch(1, 5, rows=0), "has no rows"),
        (rank_batch(1, 5, advantages=None), "advantages: 2 tokens need this stream"),
        (rank_batch(1, 5, loss_mask=bytes(2)), "loss_mask has 2 entries"),
    ],
)
def test_unusable_batch_is_named(tmp_path, batch, named):
    paths = StagePaths(tmp_path)
    send(open_batch_server("filesystem", paths, 1), batch)
    feed = feed_from(paths, "filesystem", 1, 1)
    with pytest.raises(RunError, match=named):
        list(feed.next_batch().rows)


def test_prefetch_is_bounded_and_stops():
    made = []

    def source():
        for number in range(100):
            made.append(number)
            yield number

    ahead = Prefetch(source(), depth=2)
    assert [next(ahead) for _ in range(3)] == [0, 1, 2]
    time.sleep(0.3)
    assert len(made) <= 6
    ahead.close()
    time.sleep(0.3)
    count = len(made)
    time.sleep(0.1)
    assert len(made) == count


@pytest.mark.parametrize("depth", [0, 1])
def test_prefetch_hands_on_errors_and_the_end(depth):
    def source():
        yield 1
        raise RunError("broken")

    ahead = Prefetch(source(), depth)
    assert next(ahead) == 1
    with pytest.raises(RunError, match="broken"):
        next(ahead)
    assert list(Prefetch((number for number in (1, 2)), depth)) == [1, 2]
