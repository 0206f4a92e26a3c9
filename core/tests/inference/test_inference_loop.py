"""The engine loop: both paths agree with one document at a time; batching, pausing, ending."""

from __future__ import annotations

import threading

import numpy
import pytest
import torch

from prime_rl.api.batch import PackedBatch
from prime_rl.inference.engine_loop import EngineStopped, QueueFull
from prime_rl.inference.sequence import Sequence


def reference_logprobs(driver, sequence: Sequence) -> list[float]:
    """Scores of the completion by the module itself, one document, at the sampling temperature."""
    module = driver.runner.module
    with torch.no_grad():
        hidden = module(PackedBatch.from_documents([sequence.tokens]))
        scores = torch.log_softmax(
            hidden @ module.lm_head.weight.T / sequence.params.temperature, dim=-1
        )
    places = range(sequence.prompt_length, len(sequence.tokens))
    return [float(scores[place - 1, sequence.tokens[place]]) for place in places]


@pytest.mark.parametrize("cached", [True, False])
def test_batched_sequences_score_as_the_module_scores_them_alone(drive, cached: bool) -> None:
    driver = drive(cached=cached, max_running=3)
    assert driver.runner.is_cached is cached
    group = [
        driver.sequence(f"s{n}", list(range(1, 2 + n)), seed=n, temperature=0.7, max_tokens=5 + n)
        for n in range(8)
    ]
    driver.finish(*group)
    for number, sequence in enumerate(group):
        assert len(sequence.completion) == 5 + number
        assert sequence.finish_reason == "length"
        expected = reference_logprobs(driver, sequence)
        assert sequence.logprobs == pytest.approx(expected, abs=2e-6)


def test_cached_and_recomputed_paths_draw_the_same_tokens(drive) -> None:
    drawn = []
    for cached in (True, False):
        driver = drive(cached=cached, max_running=4)
        group = [driver.sequence(f"s{n}", [n + 1], seed=n, max_tokens=20) for n in range(6)]
        driver.finish(*group)
        drawn.append([sequence.completion for sequence in group])
    assert drawn[0] == drawn[1]


def test_a_sequence_is_the_same_alone_and_in_company(drive) -> None:
    driver = drive()
    alone = driver.sequence("alone", [5, 6], seed=3)
    driver.finish(alone)
    group = [driver.sequence(f"s{n}", [n + 1] * (n + 1), seed=n) for n in range(5)]
    again = driver.sequence("again", [5, 6], seed=3)
    driver.finish(*group[:3], again, *group[3:])
    assert again.completion == alone.completion


def test_a_long_prompt_is_taken_in_parts_while_others_decode(drive) -> None:
    driver = drive(max_running=2, max_batch_tokens=4)
    short = driver.sequence("short", [1], seed=1, max_tokens=30)
    long = driver.sequence("long", list(range(1, 31)), seed=2, max_tokens=4)
    driver.finish(short, long)
    assert long.logprobs == pytest.approx(reference_logprobs(driver, long), abs=2e-6)
    order = [name for step in driver.steps for name, _ in step]
    # 30 prompt tokens at 3 beside the decoding sequence are 10 steps
    assert order.index("long") >= 9
    assert order[: order.index("long")].count("short") >= 9


@pytest.mark.parametrize("cached", [True, False])
def test_experts_are_recorded_for_every_computed_token(drive, cached: bool) -> None:
    driver = drive(cached=cached, max_running=2)
    group = [driver.sequence(f"s{n}", list(range(1, 4 + n)), seed=n) for n in range(3)]
    driver.finish(*group)
    module = driver.runner.module
    for sequence in group:
        rows = numpy.concatenate(sequence.routes)
        assert rows.shape == (len(sequence.tokens) - 1, 2, 1)
        assert (rows[:, 0] == -1).all()
        with torch.no_grad():
            from prime_rl.layers.routing import recording

            with recording() as record:
                module(PackedBatch.from_documents([sequence.tokens[:-1]]))
        assert (rows == record.stacked(2).numpy()).all()


def test_stop_tokens_end_a_sequence_and_belong_to_it(drive) -> None:
    driver = drive()
    probe = driver.sequence("probe", [1, 2], seed=4, max_tokens=20)
    driver.finish(probe)
    stop = probe.completion[3]
    first = probe.completion.index(stop)
    ended = driver.sequence(
        "ended", [1, 2], seed=4, max_tokens=20, stop_token_ids=frozenset({stop})
    )
    driver.finish(ended)
    assert ended.completion == probe.completion[: first + 1]
    assert (ended.finish_reason, ended.stop_token) == ("stop", stop)


def test_the_context_limit_ends_a_sequence(drive) -> None:
    driver = drive()
    sequence = driver.sequence("s", [1] * 60, max_tokens=99)
    driver.finish(sequence)
    assert (len(sequence.tokens), sequence.finish_reason) == (64, "length")


def test_pause_keep_freezes_and_resume_continues_to_the_same_end(drive) -> None:
    driver = drive()
    undisturbed = driver.sequence("a", [1, 2, 3], seed=9, max_tokens=40)
    driver.finish(undisturbed)
    for clear_cache in (False, True):
        sequence = driver.sequence(f"b{clear_cache}", [1, 2, 3], seed=9, max_tokens=40)
        driver.loop.submit([sequence])
        driver.loop.pause("keep", clear_cache).result(10)
        length = len(sequence.tokens)
        late = driver.sequence(f"late{clear_cache}", [4], max_tokens=2)
        driver.loop.submit([late])
        threading.Event().wait(0.05)
        assert len(sequence.tokens) == length
        assert late.completion == []
        driver.loop.resume().result(10)
        driver.wait_ended(sequence, late)
        assert sequence.completion == undisturbed.completion


def test_pause_abort_ends_what_runs_and_keeps_what_waits(drive) -> None:
    driver = drive(max_running=1)
    driver.loop.start()
    running = driver.sequence("running", [1], max_tokens=50)
    waiting = driver.sequence("waiting", [2], max_tokens=3)
    driver.loop.submit([running, waiting])
    driver.wait_for(lambda: any(driver.steps))
    driver.loop.pause("abort", True).result(10)
    assert running.finish_reason == "abort" or len(running.completion) == 50
    assert waiting.completion == []
    driver.loop.resume().result(10)
    driver.wait_ended(waiting)
    assert len(waiting.completion) == 3


def test_pause_wait_lets_what_runs_finish(drive) -> None:
    driver = drive(max_running=1)
    running = driver.sequence("running", [1], max_tokens=40)
    waiting = driver.sequence("waiting", [2], max_tokens=3)
    driver.loop.submit([running, waiting])
    driver.loop.start()
    driver.wait_for(lambda: any(driver.steps))
    driver.loop.pause("wait", False).result(10)
    assert len(running.completion) == 40
    assert waiting.completion == []
    assert driver.loop.is_paused
    driver.loop.resume().result(10)
    driver.wait_ended(waiting)


def test_abort_ends_only_the_chosen(drive) -> None:
    driver = drive(max_running=1)
    group = [driver.sequence(f"s{n}", [n + 1], max_tokens=30) for n in range(3)]
    driver.loop.submit(group)
    ended = driver.loop.abort(lambda sequence: sequence.request_id == "s1")
    driver.loop.start()
    assert ended.result(10) == 1
    driver.wait_ended(*group)
    assert [sequence.finish_reason for sequence in group] == ["length", "abort", "length"]
    assert driver.loop.running_count == driver.loop.waiting_count == 0


def test_a_full_queue_refuses_all_of_a_request(drive) -> None:
    driver = drive(max_running=1, max_queue=2)
    group = [driver.sequence(f"s{n}", [1]) for n in range(5)]
    driver.loop.submit(group[:2])
    with pytest.raises(QueueFull, match="the queue holds 2"):
        driver.loop.submit(group[2:])
    driver.loop.submit(group[2:3])
    driver.loop.start()
    driver.wait_ended(*group[:3])
    assert group[3].completion == []


def test_a_model_that_gives_nan_fails_its_requests_with_the_reason(drive) -> None:
    driver = drive()
    driver.runner.module.layers[0].mix.weight.data.fill_(float("nan"))
    sequence = driver.sequence("s", [1, 2])
    driver.finish(sequence)
    assert sequence.finish_reason == "error"
    assert "log-probability of nan" in sequence.error


def test_a_model_that_raises_fails_everybody_and_ends_the_loop(drive) -> None:
    driver = drive(max_running=1)
    driver.runner.module.layers = None
    group = [driver.sequence(f"s{n}", [1]) for n in range(3)]
    driver.finish(*group)
    assert [sequence.finish_reason for sequence in group] == ["error"] * 3
    assert driver.loop.failure is not None
    with pytest.raises(EngineStopped):
        driver.loop.submit([driver.sequence("late", [1])])
    with pytest.raises(EngineStopped):
        driver.loop.resume().result(5)


def test_whoever_gives_up_on_a_command_does_not_harm_the_engine(drive) -> None:
    driver = drive()
    pausing, resuming = driver.loop.pause("keep", False), driver.loop.resume()
    assert not pausing.cancel()
    assert not resuming.cancel()
    sequence = driver.sequence("s", [1], max_tokens=3)
    driver.finish(sequence)
    assert len(sequence.completion) == 3
    assert driver.loop.failure is None
