"""The engine thread: continuous batching, one model step after another, commands between steps.

Everything here except `submit`, `abort`, `between_steps` and the counters runs in that thread.
Results leave in one batch per step, so that the server's thread is woken once.
"""

from __future__ import annotations

import heapq
import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

import torch

from prime_rl.api.model import DecodeRequest
from prime_rl.inference.prompt_scores import score_prompts
from prime_rl.inference.runner import ModelRunner
from prime_rl.inference.sampler import Sampled, Sampler
from prime_rl.inference.sequence import FinishReason, Sequence

logger = logging.getLogger(__name__)

PauseMode = Literal["keep", "abort", "wait"]
ENDED = -1
Progress = tuple[Sequence, int]
"""A sequence and the number of tokens it had when the step ended, or ENDED."""


class QueueFull(Exception):
    """No more requests can wait."""


class EngineStopped(Exception):
    """The engine thread has ended; the text says why."""


class EngineLoop:
    """Owns the running and the waiting sequences."""

    def __init__(
        self,
        runner: ModelRunner,
        *,
        max_running: int,
        max_queue: int,
        max_batch_tokens: int,
        max_model_len: int,
        deliver: Callable[[list[Progress]], None],
    ) -> None:
        self.runner = runner
        self.max_running = max_running
        self.max_queue = max_queue
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = max_model_len
        self.deliver = deliver
        self.sampler = Sampler(runner.device)
        self.is_paused = False
        self.failure: str | None = None
        """Why the thread ended, when it ended by itself."""
        self.generated_tokens = 0
        self.prompt_tokens = 0
        self.steps = 0
        self.finished_counts: dict[str, int] = {}
        self._running: list[Sequence] = []
        self._waiting: deque[Sequence] = deque()
        self._free_slots = list(range(max_running))
        self._inbox: deque[Sequence] = deque()
        self._commands: deque[tuple[Callable[[], Any], Future[Any]]] = deque()
        self._pauses: list[Future[Any]] = []
        self._admits = True
        self._is_in_slot_order = True
        self.is_stopping = False
        """Told to end."""
        self._wake = threading.Event()
        self._progress: list[Progress] = []
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # Called from other threads.

    @property
    def running_count(self) -> int:
        """Sequences in the batch."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """Sequences that wait for a place."""
        return len(self._waiting) + len(self._inbox)

    @property
    def cached_tokens(self) -> int:
        """Tokens of running sequences that the cache holds."""
        return sum(sequence.cached for sequence in list(self._running))

    @property
    def cache_capacity_tokens(self) -> int:
        """Tokens that the cache holds; 0 without a cache."""
        return self.max_running * self.max_model_len if self.runner.is_cached else 0

    def start(self) -> None:
        """Begin to step."""
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> None:
        """End the thread after the step it is in."""
        self.is_stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences, all or none. Raises QueueFull or EngineStopped."""
        waiting = self.waiting_count
        free = self.max_running - self.running_count if self._admits else 0
        if waiting + len(sequences) > self.max_queue + max(free, 0):
            raise QueueFull(f"{waiting} requests wait, the queue holds {self.max_queue}")
        self._inbox.extend(sequences)
        self._wake.set()
        if self.failure is not None:
            self._inbox.clear()
            raise EngineStopped(self.failure)

    def abort(self, chosen: Callable[[Sequence], bool]) -> Future[Any]:
        """End the chosen sequences with finish reason `abort`; the result is their number."""
        return self.between_steps(lambda: self._abort(chosen))

    def between_steps(self, command: Callable[[], Any]) -> Future[Any]:
        """Run a function in the engine thread between two steps; its result or exception is in the
        future."""
        future = _lasting_future()
        self._commands.append((command, future))
        self._wake.set()
        if self.failure is not None:
            self._fail_commands()
        return future

    def pause(self, mode: PauseMode, clear_cache: bool) -> Future[Any]:
        """Stop stepping: at once (`keep`), after aborting (`abort`) or after finishing (`wait`) what
        runs. The future is done when nothing steps any more; new requests queue meanwhile."""
        done = _lasting_future()

        def begin() -> None:
            self._admits = False
            if mode == "abort":
                self._abort(lambda sequence: sequence.slot >= 0)
            if mode == "wait" and self._running:
                self._pauses.append(done)
            else:
                self.is_paused = True
                done.set_result(None)
            if clear_cache:
                self._forget()

        started = self.between_steps(begin)
        started.add_done_callback(lambda future: _pass_failure(future, done))
        return done

    def resume(self) -> Future[Any]:
        """Step again."""

        def begin() -> None:
            self.is_paused = False
            self._admits = True
            self._release_pauses()

        return self.between_steps(begin)

    # The engine thread.

    def _run(self) -> None:
        try:
            if self.runner.device.type == "cuda":
                torch.cuda.set_device(self.runner.device)  # per thread; kernels launch there
            with torch.inference_mode():
                while not self.is_stopping:
                    self._take_commands()
                    has_work = bool(self._running or (self._admits and self._waiting))
                    if has_work and not self.is_paused:
                        self._step()
                    self._send_progress()
                    if not has_work or self.is_paused:
                        self._wake.wait()
                        self._wake.clear()
        except Exception as error:  # whatever a model plugin raises must reach those who wait
            logger.exception("the engine stopped")
            self.failure = f"{type(error).__name__}: {error}"
        else:
            self.failure = "the engine is shutting down"
        for sequence in [*self._running, *self._waiting, *self._inbox]:
            sequence.error = self.failure
            self._finish(sequence, "error")
        self._running, self._waiting, self._inbox = [], deque(), deque()
        self._send_progress()
        self._fail_commands()

    def _fail_commands(self) -> None:
        while self._commands:
            _, future = self._commands.popleft()
            future.set_exception(EngineStopped(self.failure))
        self._release_pauses()

    def _take_commands(self) -> None:
        while self._inbox:
            self._waiting.append(self._inbox.popleft())
        for _ in range(len(self._commands)):
            command, future = self._commands.popleft()
            try:
                future.set_result(command())
            except Exception as error:  # belongs to whoever waits for the future
                future.set_exception(error)

    def _step(self) -> None:
        self._score_prompts()
        self._admit()
        if not self._running:
            return
        requests, sequences = self._requests()
        hidden = self.runner.append(sequences, requests)
        ready = [
            row for row, sequence in enumerate(sequences) if sequence.cached == len(sequence.tokens)
        ]
        if not ready:
            return
        if len(ready) < len(sequences):
            hidden = hidden[ready]
            sequences = [sequences[row] for row in ready]
        sampled = self.sampler.sample(self.runner.logits(hidden), sequences)
        self._append_sampled(sequences, sampled)
        self.steps += 1

    def _score_prompts(self) -> None:
        """Score the prompts at the head of the queue, one pack per step, so that others go on
        meanwhile. Who wants no more than one token then gets it without a place in the batch."""
        pack: list[Sequence] = []
        room = self.max_batch_tokens
        while self._admits and self._waiting and self._waiting[0].awaits_scores:
            room -= self._waiting[0].prompt_length
            if pack and room < 0:
                break
            pack.append(self._waiting.popleft())
        if not pack:
            return
        hidden = score_prompts(self.runner, pack)
        for sequence in pack:
            if sequence.error:
                self._finish(sequence, "error")
        sound = [row for row, sequence in enumerate(pack) if not sequence.error]
        done = [
            row for row in sound if pack[row].params.max_tokens == 1 and not pack[row].wants_routes
        ]
        self._waiting.extendleft(pack[row] for row in reversed(sound) if row not in set(done))
        if done:
            ending = [pack[row] for row in done]
            self.prompt_tokens += sum(sequence.prompt_length for sequence in ending)
            sampled = self.sampler.sample(self.runner.logits(hidden[done]), ending)
            self._append_sampled(ending, sampled)

    def _admit(self) -> None:
        while self._admits and self._waiting and self._free_slots:
            if self._waiting[0].awaits_scores:
                return
            sequence = self._waiting.popleft()
            sequence.slot = heapq.heappop(self._free_slots)
            self._is_in_slot_order = False
            self.prompt_tokens += sequence.prompt_length
            self._running.append(sequence)

    def _requests(self) -> tuple[list[DecodeRequest], list[Sequence]]:
        """What to append in this step: one token for each decoding sequence and, of the longer
        rests, as many tokens as the batch has room for (a cache takes a prompt in parts). In slot
        order, which lets a cache read its slots where they lie."""
        room = self.max_batch_tokens
        if not self.runner.is_cached:
            room = sum(len(sequence.tokens) for sequence in self._running) + 1
        requests: list[DecodeRequest] = []
        sequences: list[Sequence] = []
        for sequence in self._running:
            start = sequence.cached
            count = len(sequence.tokens) - start
            if count > 1:
                count = min(count, room)
                if count <= 0:
                    continue
            room -= count
            requests.append(
                DecodeRequest(sequence.slot, start, sequence.tokens[start : start + count])
            )
            sequences.append(sequence)
        if not self._is_in_slot_order:
            self._is_in_slot_order = len(sequences) == len(self._running)
            order = sorted(range(len(sequences)), key=lambda place: sequences[place].slot)
            if self._is_in_slot_order:
                self._running = [self._running[place] for place in order]
            requests = [requests[place] for place in order]
            sequences = [sequences[place] for place in order]
        return requests, sequences

    def _append_sampled(self, sequences: list[Sequence], sampled: Sampled) -> None:
        ended = is_cache_spoilt = False
        for row, sequence in enumerate(sequences):
            token, logprob = sampled.tokens[row], sampled.logprobs[row]
            if not math.isfinite(logprob):
                sequence.error = (
                    f"the model gave a log-probability of {logprob} after "
                    f"{len(sequence.tokens)} tokens; its weights or its code are damaged"
                )
                self._finish(sequence, "error")
                ended = is_cache_spoilt = True
                continue
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            if sequence.wants_kept:
                sequence.kept.append(sampled.kept.get(row, []))
            if sequence.params.top_logprobs:
                sequence.top_logprobs.append(sampled.tops[row])
            reason = self._reason_to_finish(sequence, token)
            if reason is not None:
                self._finish(sequence, reason)
                ended = True
            elif sequence.notify is not None:
                self._progress.append((sequence, len(sequence.tokens)))
        self.generated_tokens += len(sequences)
        if ended:
            self._running = [s for s in self._running if s.finish_reason is None]
        if is_cache_spoilt:
            self.runner.renew_decoder()
            self.restart_caches()

    def _reason_to_finish(self, sequence: Sequence, token: int) -> FinishReason | None:
        params = sequence.params
        length = len(sequence.logprobs)
        if length >= params.min_tokens:
            if token in params.stop_token_ids:
                sequence.stop_token = token
                return "stop"
            if sequence.is_stopped_by_text is not None and sequence.is_stopped_by_text(
                sequence.completion
            ):
                return "stop"
        if length >= params.max_tokens or len(sequence.tokens) >= self.max_model_len:
            return "length"
        return None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self.finished_counts[reason] = self.finished_counts.get(reason, 0) + 1
        if sequence.slot >= 0:
            heapq.heappush(self._free_slots, sequence.slot)
            sequence.slot = -1
        self._progress.append((sequence, ENDED))

    def _abort(self, chosen: Callable[[Sequence], bool]) -> int:
        ending = [sequence for sequence in [*self._running, *self._waiting] if chosen(sequence)]
        for sequence in ending:
            self._finish(sequence, "abort")
        if ending:
            self._running = [s for s in self._running if s.finish_reason is None]
            self._waiting = deque(s for s in self._waiting if s.finish_reason is None)
        return len(ending)

    def _forget(self) -> None:
        """Drop the cache; running sequences are appended anew by the next steps."""
        self.runner.decoder.forget()
        self.restart_caches()

    def restart_caches(self) -> None:
        """The decoder has forgotten: every running sequence starts at its first token."""
        for sequence in self._running:
            sequence.cached = 0

    def _send_progress(self) -> None:
        if not self._admits and not self._running and not self.is_paused:
            self.is_paused = True
            self._release_pauses()
        if self._progress:
            progress, self._progress = self._progress, []
            self.deliver(progress)

    def _release_pauses(self) -> None:
        pauses, self._pauses = self._pauses, []
        for future in pauses:
            future.set_result(None)


def _lasting_future() -> Future[Any]:
    """A future that whoever waits cannot cancel: the engine thread sets it in any case."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def _pass_failure(started: Future[Any], done: Future[Any]) -> None:
    error = started.exception()
    if error is not None and not done.done():
        done.set_exception(error)
