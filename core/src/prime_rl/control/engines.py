"""Admin calls to every engine of a run, past the router: pause, new weights, resume, health."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx

from prime_rl.errors import RunError

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 300.0
UPDATE_TIMEOUT_S = 720.0
LIVENESS_TIMEOUT_S = 30.0
METRICS_TIMEOUT_S = 5.0
ATTEMPTS = 10
FIRST_RETRY_S = 0.1
LAST_RETRY_S = 10.0
POLL_S = 0.05


class EngineAdmin:
    """One client for all engines. Every call goes to all of them at the same time.

    Network failures and 5xx answers are tried again, at most `ATTEMPTS` times and twice the call's
    time limit; other answers are final. Raises RunError naming the engines that failed and why.
    """

    def __init__(
        self,
        urls: Sequence[str],
        request_timeout_s: float = REQUEST_TIMEOUT_S,
        update_timeout_s: float = UPDATE_TIMEOUT_S,
        attempts: int = ATTEMPTS,
    ) -> None:
        if not urls:
            raise ValueError("no engine URLs")
        self.urls = tuple(url.rstrip("/") for url in urls)
        self.request_timeout_s = request_timeout_s
        self.update_timeout_s = update_timeout_s
        self.attempts = attempts
        self._client = httpx.AsyncClient(trust_env=False, timeout=request_timeout_s)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def pause(self) -> None:
        """Freeze generation: running requests stay where they are, new ones queue."""
        await self._all("pause", lambda url: self._post(url, "/pause?mode=keep&clear_cache=false"))

    async def resume(self) -> None:
        """Go on generating."""
        await self._all("resume", lambda url: self._post(url, "/resume"))

    async def update(self, version: int, directory: Path) -> None:
        """Take the published weights of `version`."""
        body = {"update_info": {"version": version, "directory": str(directory.resolve())}}
        await self._all(
            f"update to version {version}",
            lambda url: self._post(url, "/update_weights", body, self.update_timeout_s),
        )

    async def versions(self) -> list[int]:
        """Weight version of each engine, in the order of the URLs."""
        answers = await self._all("weight_info", lambda url: self._get(url, "/weight_info"))
        return [int(answer["weight_version"]) for answer in answers]

    async def served_name(self) -> str:
        """Name under which the first engine serves the model."""
        answers = await self._all("models", lambda url: self._get(url, "/v1/models"))
        return str(answers[0]["data"][0]["id"])

    async def health(self) -> dict[str, bool]:
        """Which engines answer that they live; never raises for one that does not."""

        async def lives(url: str) -> bool:
            try:
                answer = await self._client.get(url + "/liveness", timeout=LIVENESS_TIMEOUT_S)
            except httpx.HTTPError:
                return False
            return answer.is_success

        alive = await asyncio.gather(*(lives(url) for url in self.urls))
        return dict(zip(self.urls, alive, strict=True))

    async def metrics(self) -> list[str] | None:
        """The /metrics page of every engine; None when one does not answer with a page in time. Asked
        once, never again: the next poll will."""

        async def page(url: str) -> str | None:
            try:
                answer = await self._client.get(url + "/metrics", timeout=METRICS_TIMEOUT_S)
            except httpx.HTTPError:
                return None
            return answer.text if answer.is_success else None

        pages = await asyncio.gather(*(page(url) for url in self.urls))
        found = [text for text in pages if text is not None]
        return found if len(found) == len(pages) else None

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until every engine answers /health with 200. Raises RunError naming the others."""
        deadline = time.monotonic() + timeout_s
        waiting = set(self.urls)
        reasons: dict[str, str] = {}
        while True:
            for url in sorted(waiting):
                try:
                    answer = await self._client.get(url + "/health", timeout=LIVENESS_TIMEOUT_S)
                except httpx.HTTPError as error:
                    reasons[url] = _name(error)
                    continue
                if answer.is_success:
                    waiting.discard(url)
                else:
                    reasons[url] = _text(answer)
            if not waiting:
                return
            if time.monotonic() > deadline:
                detail = "; ".join(f"{url}: {reasons[url]}" for url in sorted(waiting))
                raise RunError(f"engines not ready after {timeout_s:g} s: {detail}")
            await asyncio.sleep(POLL_S)

    async def _all(self, what: str, call: Callable[[str], Awaitable[Any]]) -> list[Any]:
        outcomes = await asyncio.gather(
            *(self._retry(lambda url=url: call(url)) for url in self.urls),  # type: ignore[misc]
            return_exceptions=True,
        )
        failed = []
        for url, outcome in zip(self.urls, outcomes, strict=True):
            if isinstance(outcome, (httpx.HTTPError, _Refused)):
                failed.append(f"{url}: {_name(outcome)}")
            elif isinstance(outcome, BaseException):
                raise outcome
        if failed:
            count = f"{len(failed)} of {len(self.urls)} engines"
            raise RunError(f"{what} failed on {count}: {'; '.join(failed)}")
        return list(outcomes)

    async def _retry(self, call: Callable[[], Awaitable[Any]]) -> Any:
        started = time.monotonic()
        wait_s = FIRST_RETRY_S
        for attempt in range(1, self.attempts + 1):
            try:
                return await call()
            except (httpx.HTTPError, _Refused) as error:
                is_final = isinstance(error, _Refused) and error.status < 500
                spent = time.monotonic() - started
                if is_final or attempt == self.attempts or spent > 2 * self.request_timeout_s:
                    raise
                logger.warning("%s; trying again in %.1f s", _name(error), wait_s)
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, LAST_RETRY_S)
        raise AssertionError("the last attempt returns or raises")

    async def _post(
        self, url: str, path: str, body: Any = None, timeout_s: float | None = None
    ) -> Any:
        answer = await self._client.post(
            url + path, json=body, timeout=timeout_s or self.request_timeout_s
        )
        return _content(answer)

    async def _get(self, url: str, path: str) -> Any:
        return _content(await self._client.get(url + path))


class _Refused(Exception):
    """An answer that is no success."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status


def _content(answer: httpx.Response) -> Any:
    if not answer.is_success:
        raise _Refused(answer.status_code, _text(answer))
    return answer.json() if answer.content else None


def _text(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return answer.text[:500]


def _name(error: Exception) -> str:
    if isinstance(error, _Refused):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
