"""Weight updates of a running engine: both paths continue with exactly the new weights."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from prime_rl.api.batch import PackedBatch
from prime_rl.api.transport import NamedTensor, Receiver
from prime_rl.errors import WeightTransferError
from prime_rl.inference.weights import WeightUpdater
from prime_rl.models.save import iter_checkpoint
from prime_rl.models.setup import build


class MemoryReceiver(Receiver):
    """Delivers what a test puts into it."""

    def __init__(self) -> None:
        self.versions: dict[int, list[NamedTensor]] = {}
        self.closed = False

    def receive(self, version: int, directory: Path) -> Iterator[NamedTensor]:
        if version not in self.versions:
            raise WeightTransferError(f"version {version} is incomplete")
        yield from self.versions[version]

    def close(self) -> None:
        self.closed = True


def other_weights(setup, seed: int) -> tuple[torch.nn.Module, list[NamedTensor]]:
    """A module with other random weights, and its checkpoint tensors."""
    module = build(setup, "cpu")
    setup.plugin.initialise(module, torch.Generator().manual_seed(seed))
    return module, list(iter_checkpoint(module, setup.layout))


def scores(module, tokens: list[int], first: int) -> list[float]:
    with torch.no_grad():
        hidden = module(PackedBatch.from_documents([tokens]))
        table = torch.log_softmax(hidden @ module.lm_head.weight.T, dim=-1)
    return [float(table[place - 1, tokens[place]]) for place in range(first, len(tokens))]


@pytest.mark.parametrize("cached", [True, False])
def test_running_sequences_continue_with_exactly_the_new_weights(drive, cached: bool) -> None:
    driver = drive(cached=cached, max_running=3)
    setup = driver.setup
    old = build(setup, "cpu")
    old.load_state_dict(driver.runner.module.state_dict())
    new, tensors = other_weights(setup, 5)
    receiver = MemoryReceiver()
    receiver.versions[1] = tensors
    updater = WeightUpdater(driver.loop, receiver)
    group = [driver.sequence(f"s{n}", [n + 1] * (n + 2), seed=n, max_tokens=20) for n in range(5)]
    driver.loop.submit(group)
    at: dict[str, int] = {}

    def update_after_seven_steps() -> None:
        if driver.loop.steps < 7:
            driver.loop.between_steps(update_after_seven_steps)
            return
        at.update({s.request_id: len(s.logprobs) for s in group})
        updater.apply(1, Path("unused"))

    driver.loop.between_steps(update_after_seven_steps)
    driver.loop.start()
    driver.wait_ended(*group)
    assert list(at.values()) == [7, 7, 7, 0, 0]
    assert updater.version == 1
    for sequence in group:
        switch = at[sequence.request_id]
        first = sequence.prompt_length
        by_old, by_new = (scores(module, sequence.tokens, first) for module in (old, new))
        assert sequence.logprobs[:switch] == pytest.approx(by_old[:switch], abs=2e-6)
        assert sequence.logprobs[switch:] == pytest.approx(by_new[switch:], abs=2e-6)
        assert sequence.logprobs[switch:] != pytest.approx(by_old[switch:], abs=1e-3)


def test_the_same_update_twice_changes_nothing(drive) -> None:
    driver = drive()
    driver.loop.start()
    receiver = MemoryReceiver()
    _, receiver.versions[1] = other_weights(driver.setup, 5)
    receiver.versions[2] = receiver.versions[1]
    updater = WeightUpdater(driver.loop, receiver)
    outputs = []
    for version in (1, 2):
        driver.loop.between_steps(lambda v=version: updater.apply(v, Path("unused"))).result(10)
        sequence = driver.sequence(f"v{version}", [1, 2], seed=1)
        driver.finish(sequence)
        outputs.append((sequence.completion, sequence.logprobs))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_follows_the_embedding(drive, tied: bool) -> None:
    driver = drive(tie_word_embeddings=tied)
    driver.loop.start()
    receiver = MemoryReceiver()
    new, receiver.versions[1] = other_weights(driver.setup, 5)
    assert ("lm_head.weight" in dict(receiver.versions[1])) is not tied
    updater = WeightUpdater(driver.loop, receiver)
    driver.loop.between_steps(lambda: updater.apply(1, Path("unused"))).result(10)
    sequence = driver.sequence("s", [1, 2], seed=1)
    driver.finish(sequence)
    head = new.embed_tokens if tied else new.lm_head
    with torch.no_grad():
        hidden = new(PackedBatch.from_documents([[1, 2]]))[-1]
        expected = torch.log_softmax(head.weight @ hidden, dim=0)[sequence.completion[0]]
    assert sequence.logprobs[0] == pytest.approx(float(expected), abs=2e-6)


def ask_for(server, version: int) -> httpx.Response:
    info = {"version": version, "directory": "unused"}
    return server.client.post("/update_weights", json={"update_info": info})


def test_a_version_that_cannot_be_had_leaves_the_old_one_serving(serve_toy) -> None:
    server = serve_toy(receiver=MemoryReceiver())
    before = server.generate([1, 2], seed=1, max_tokens=5)["choices"]
    answer = ask_for(server, 7)
    assert answer.status_code == 500
    assert "version 7 is incomplete" in answer.json()["error"]["message"]
    assert server.client.get("/weight_info").json() == {"weight_version": "0"}
    assert server.client.get("/health").status_code == 200
    assert server.generate([1, 2], seed=1, max_tokens=5)["choices"] == before


def test_half_an_update_stops_generation_until_a_whole_one_comes(serve_toy) -> None:
    receiver = MemoryReceiver()
    server = serve_toy(receiver=receiver)
    _, whole = other_weights(server.setup, 5)
    receiver.versions = {
        1: whole[:-1],
        2: [*whole, NamedTensor("no.such", torch.ones(1))],
        3: whole,
    }
    for version, part in ((1, "lm_head.weight"), (2, "no.such")):
        answer = ask_for(server, version)
        assert answer.status_code == 500
        assert part in answer.json()["error"]["message"]
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/liveness").status_code == 200
        refused = server.client.post(
            "/inference/v1/generate", json={"token_ids": [1], "sampling_params": {}}
        )
        assert refused.status_code == 503
        assert f"version {version} did not complete" in refused.json()["error"]["message"]
    assert ask_for(server, 3).status_code == 200
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/weight_info").json() == {"weight_version": "3"}
    server.generate([1], max_tokens=2)


def test_an_update_waits_for_no_request_and_frees_the_receiver_at_the_end(serve_toy) -> None:
    receiver = MemoryReceiver()
    server = serve_toy(receiver=receiver)
    _, receiver.versions[1] = other_weights(server.setup, 5)

    async def run() -> dict:
        async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
            await client.post("/pause?mode=keep&clear_cache=false")
            body = {"token_ids": [1], "sampling_params": {"max_tokens": 4, "ignore_eos": True}}
            call = asyncio.create_task(client.post("/inference/v1/generate", json=body))
            info = {"version": 1, "directory": "unused"}
            update = await client.post("/update_weights", json={"update_info": info})
            assert update.status_code == 200
            assert not call.done()
            await client.post("/resume")
            return (await call).json()

    assert len(asyncio.run(run())["choices"][0]["token_ids"]) == 4
    server.close()
    assert receiver.closed


class SlowReceiver(MemoryReceiver):
    """Stops after the first tensor until the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_go_on = threading.Event()

    def receive(self, version: int, directory: Path) -> Iterator[NamedTensor]:
        for number, tensor in enumerate(super().receive(version, directory)):
            yield tensor
            if number == 1:
                self.has_begun.set()
                assert self.may_go_on.wait(10)


def test_a_request_that_arrives_during_an_update_waits_for_it(serve_toy) -> None:
    receiver = SlowReceiver()
    server = serve_toy(receiver=receiver)
    _, receiver.versions[1] = other_weights(server.setup, 5)
    with ThreadPoolExecutor(2) as pool:
        update = pool.submit(ask_for, server, 1)
        assert receiver.has_begun.wait(10)
        assert server.client.get("/health").status_code == 200
        request = pool.submit(server.generate, [1, 2], seed=1, max_tokens=5)
        time.sleep(0.1)
        assert not request.done()
        receiver.may_go_on.set()
        assert update.result(10).status_code == 200
        during = request.result(10)["choices"][0]
    after = server.generate([1, 2], seed=1, max_tokens=5)["choices"][0]
    assert during["token_ids"] == after["token_ids"]
    assert during["logprobs"] == after["logprobs"]
