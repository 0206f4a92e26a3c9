"""Both batch transports: pull by step and rank, back pressure, closing with a reason, restarts."""

import asyncio
import threading
import time

import msgspec
import pytest
import zmq

from prime_rl.batches import BatchClosed, BatchTimeout, open_batch_client, open_batch_server
from prime_rl.configs.paths import StagePaths
from prime_rl.wire import BatchHeader, MicroBatch, RankBatch

KINDS = ["zmq", "filesystem"]


def rank_batch(step: int, rank: int, tokens: int = 3) -> RankBatch:
    micro = MicroBatch(
        input_ids=bytes([rank]) * 4 * tokens,
        loss_mask=b"\x01" * tokens,
        inference_logprobs=b"\0" * 4 * tokens,
        temperatures=b"\0" * 4 * tokens,
        lengths=[tokens],
        env_names=["words"],
        document_envs=[0],
        trace_ids=["t"],
        branch_indices=[0],
    )
    return RankBatch(BatchHeader(step=step, policy_version=step - 1), [micro])


def batch_of(step: int, ranks: int = 2) -> list[RankBatch]:
    return [rank_batch(step, rank) for rank in range(ranks)]


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


def test_each_rank_pulls_its_own_rows(kind, tmp_path):
    paths = StagePaths(tmp_path)
    server = open_batch_server(kind, paths, 2)
    clients = [open_batch_client(kind, paths, rank) for rank in range(2)]
    asyncio.run(server.send(1, batch_of(1)))
    for rank, client in enumerate(clients):
        assert client.receive(1, 5) == rank_batch(1, rank)
        client.close()
    server.close()


def test_a_rank_that_asks_before_the_batch_exists_gets_it(kind, tmp_path):
    paths = StagePaths(tmp_path)
    received = []
    client = open_batch_client(kind, paths, 0)
    puller = threading.Thread(target=lambda: received.append(client.receive(1, 10)))
    puller.start()
    time.sleep(0.1)
    server = open_batch_server(kind, paths, 1)
    asyncio.run(server.send(1, batch_of(1, 1)))
    puller.join(10)
    assert received == [rank_batch(1, 0)]
    client.close()
    server.close()


def test_the_third_step_waits_until_the_ranks_have_moved_on(kind, tmp_path):
    paths = StagePaths(tmp_path)
    server = open_batch_server(kind, paths, 1)
    client = open_batch_client(kind, paths, 0)

    async def scenario():
        await server.send(1, batch_of(1, 1))
        await server.send(2, batch_of(2, 1))
        third = asyncio.create_task(server.send(3, batch_of(3, 1)))
        await asyncio.sleep(0.15)
        assert not third.done()
        await asyncio.to_thread(client.receive, 1, 5)
        await asyncio.to_thread(client.receive, 2, 5)
        await asyncio.wait_for(third, 5)

    asyncio.run(scenario())
    assert client.receive(3, 5).header.step == 3
    client.close()
    server.close()


def test_a_restarted_rank_gets_the_same_batch_again(kind, tmp_path):
    paths = StagePaths(tmp_path)
    server = open_batch_server(kind, paths, 1)
    asyncio.run(server.send(1, batch_of(1, 1)))
    for _ in range(2):
        client = open_batch_client(kind, paths, 0)
        assert client.receive(1, 5).header.step == 1
        client.close()
    server.close()


def test_a_replaced_server_is_found_again(tmp_path):
    paths = StagePaths(tmp_path)
    first = open_batch_server("zmq", paths, 1)
    asyncio.run(first.send(1, batch_of(1, 1)))
    client = open_batch_client("zmq", paths, 0)
    client.receive(1, 5)
    first.close()
    second = open_batch_server("zmq", paths, 1)
    asyncio.run(second.send(2, batch_of(2, 1)))
    assert client.receive(2, 10).header.step == 2
    client.close()
    second.close()


def test_closing_tells_waiting_ranks_the_reason(kind, tmp_path):
    paths = StagePaths(tmp_path)
    server = open_batch_server(kind, paths, 1)
    failures = []

    def pull():
        client = open_batch_client(kind, paths, 0)
        with pytest.raises(BatchClosed) as caught:
            client.receive(1, 20)
        failures.append(str(caught.value))
        client.close()

    puller = threading.Thread(target=pull)
    puller.start()
    time.sleep(0.3)
    server.close("10 empty batches")
    puller.join(10)
    assert failures == ["10 empty batches"]
    server.close("twice is fine")


def test_no_batch_in_time_is_a_timeout(kind, tmp_path):
    paths = StagePaths(tmp_path)
    client = open_batch_client(kind, paths, 0)
    with pytest.raises(BatchTimeout, match="did not offer batches"):
        client.receive(1, 0.1)
    server = open_batch_server(kind, paths, 1)
    with pytest.raises(BatchTimeout, match="step 1"):
        client.receive(1, 0.2)
    client.close()
    server.close()


def test_wrong_number_of_ranks_is_refused(kind, tmp_path):
    server = open_batch_server(kind, StagePaths(tmp_path), 2)
    with pytest.raises(ValueError, match="expected 2 rank batches, found 1"):
        asyncio.run(server.send(1, batch_of(1, 1)))
    server.close()


class SlowToConnect:
    """A context whose sockets, once connected, wait until a thread has ended."""

    def __init__(self, inner, thread):
        self._inner, self._thread = inner, thread

    def socket(self, kind):
        return SlowToConnect(self._inner.socket(kind), self._thread)

    def connect(self, address):
        self._inner.connect(address)
        self._thread.join(10)

    def __getattr__(self, name):
        return getattr(self._inner, name)


def test_a_server_whose_thread_leaves_before_it_is_told_still_closes(tmp_path):
    """It sees the closing when it looks by itself; a bell without anyone to hear it must not wait."""
    server = open_batch_server("zmq", StagePaths(tmp_path), 1)
    server._context = SlowToConnect(server._context, server._thread)
    closing = threading.Thread(target=server.close, daemon=True)
    closing.start()
    closing.join(10)
    assert not server._thread.is_alive()
    assert not closing.is_alive()


def test_malformed_requests_do_not_disturb_the_server(tmp_path):
    paths = StagePaths(tmp_path)
    server = open_batch_server("zmq", paths, 1)
    address = paths.batch_address.read_text().strip()
    assert address.startswith("tcp://127.0.0.1:")
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.connect(address)
    for junk in [b"", b"\x80\x04pickle", msgspec.msgpack.encode({"step": 1}), b"\xff" * 1000]:
        socket.send(junk)
    socket.send_multipart([b"a", b"b", b"c"])
    socket.send(msgspec.msgpack.encode([1, 7, 1]))
    assert socket.poll(5000)
    answer = msgspec.msgpack.decode(socket.recv_multipart()[0])
    assert answer[0] == "refused"
    asyncio.run(server.send(1, batch_of(1, 1)))
    client = open_batch_client("zmq", paths, 0)
    assert client.receive(1, 5) == rank_batch(1, 0)
    client.close()
    socket.close(linger=0)
    context.term()
    server.close()


def test_files_are_whole_or_absent(tmp_path):
    paths = StagePaths(tmp_path)
    server = open_batch_server("filesystem", paths, 2)
    asyncio.run(server.send(1, batch_of(1)))
    names = sorted(path.name for path in (paths.rollouts / "step_1").iterdir())
    assert names == ["rank_0.bin", "rank_1.bin"]
    server.close()
