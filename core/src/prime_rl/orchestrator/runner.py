"""Runs one episode on its env server: time limit, outcomes, session release."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from prime_rl.configs.orchestrator import SourceConfig
from prime_rl.errors import PrimeError, what_was_raised
from prime_rl.orchestrator.assembly import LostDelta
from prime_rl.orchestrator.env_client import Environment, EpisodeRefused
from prime_rl.orchestrator.episode import EpisodeRequest, EpisodeResult, Split, failed_result
from prime_rl.orchestrator.needs import EpisodeNeeds
from prime_rl.orchestrator.policy import Policy
from prime_rl.orchestrator.records import NEEDS_NOTHING, read_episode
from prime_rl.orchestrator.sampling import sampling_settings
from prime_rl.orchestrator.tasks import TaskRow

log = logging.getLogger(__name__)

FAILED_EPISODE_S = 1.0
"""Least seconds that a failed episode takes."""


@dataclass(frozen=True)
class LoadedSource:
    """A source with its tasks and the environment that runs them."""

    config: SourceConfig
    tasks: Sequence[TaskRow]
    environment: Environment
    frozen_model: str | None = None
    """Name of the frozen model that plays the episodes; None: the policy does."""

    @property
    def is_frozen(self) -> bool:
        """A frozen model plays the episodes."""
        return self.frozen_model is not None


class ServedEpisodeRunner:
    """The EpisodeRunner of a run. Sessions at the router are released however an episode ends."""

    def __init__(
        self,
        sources: Mapping[tuple[Split, str], LoadedSource],
        policy: Policy,
        release_sessions: Callable[[Sequence[str]], None],
        seq_len: int,
        timeout_s: float,
        needs: Mapping[str, EpisodeNeeds] | None = None,
    ) -> None:
        """`needs` are those of the training sources."""
        self._sources = sources
        self._policy = policy
        self._release_sessions = release_sessions
        self._seq_len = seq_len
        self._timeout_s = timeout_s
        self._needs = {("train", label): each for label, each in (needs or {}).items()}

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        """See EpisodeRunner.run. A failed episode keeps its place for a moment, so that an engine
        that refuses everything is not asked without pause. Raises RunError when the engine does not
        return what the source needs."""
        result = await self._run(request)
        if result.outcome == "error":
            await asyncio.sleep(max(0.0, FAILED_EPISODE_S - result.duration_s))
        return result

    async def _run(self, request: EpisodeRequest) -> EpisodeResult:
        source = self._sources[request.split, request.source]
        started = time.monotonic()
        call = source.environment.start(
            source.tasks[request.task_index].data,
            source.frozen_model or self._policy.model,
            sampling_settings(
                source.config.sampling, request, source.config.group_size, source.is_frozen
            ),
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                record = await call.result()
        except TimeoutError:
            error = f"EpisodeTimeout: not over after {self._timeout_s:g} s"
            return failed_result(request, "timeout", error, time.monotonic() - started)
        except (EpisodeRefused, LostDelta) as error:
            text = f"{type(error).__name__}: {error}"
            return failed_result(request, "error", text, time.monotonic() - started)
        finally:
            self._release_sessions(call.trace_ids)
        try:
            return read_episode(
                record,
                request,
                temperature=source.config.sampling.temperature,
                seq_len=self._seq_len,
                end_version=self._policy.version,
                duration_s=time.monotonic() - started,
                is_frozen=source.is_frozen,
                needs=self._needs.get((request.split, request.source), NEEDS_NOTHING),
            )
        except PrimeError:
            raise
        except Exception as error:  # whatever other contents than promised make raise
            text = str(error) if isinstance(error, ValueError) else what_was_raised(error)
            task = source.tasks[request.task_index].key
            log.warning("damaged episode of source %r, task %s: %s", request.source, task, text)
            return failed_result(request, "error", f"DamagedEpisode: {text}")
