"""Which engine a session is on. Plain bookkeeping, used from one event loop; no network here."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass


@dataclass(eq=False)
class Engine:
    """An engine as the router sees it."""

    url: str
    is_healthy: bool = True
    failed_checks: int = 0
    sessions: int = 0
    """Sessions placed here, those still opening included."""
    requests: int = 0
    """Requests in flight."""
    loose_requests: int = 0
    """Requests in flight that belong to no session."""
    last_chosen: int = 0
    """Number of the choice that last fell on this engine; breaks ties."""

    @property
    def load(self) -> int:
        """What new sessions are balanced by."""
        return self.sessions + self.loose_requests


@dataclass(eq=False)
class Session:
    """A placed session."""

    engine: Engine
    is_bound: bool = False
    """False until the first request was answered; then the engine holds the session's cache."""
    requests: int = 0
    """In flight."""
    used_at: float = 0.0


class Placements:
    """Sessions and engines. A session is reserved when it is placed and bound once its first
    request has been answered, so that a failed opening leaves the choice free."""

    def __init__(
        self,
        urls: Sequence[str],
        session_idle_s: float,
        max_sessions: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engines = [Engine(url.rstrip("/")) for url in urls]
        self.session_idle_s = session_idle_s
        self.max_sessions = max_sessions
        self.sessions: OrderedDict[str, Session] = OrderedDict()
        """Least recently used first."""
        self._clock = clock
        self._choices = 0

    def begin(self, name: str | None, tried: Collection[Engine] = ()) -> Engine | None:
        """The engine for a request of session `name` (None: of no session); None when all were
        tried. A request that was begun must be ended."""
        session = self._session(name, tried) if name is not None else None
        if name is None:
            engine = self._choose(tried)
            if engine is not None:
                engine.loose_requests += 1
        else:
            engine = session.engine if session is not None else None
        if engine is not None:
            engine.requests += 1
        return engine

    def end(self, name: str | None, engine: Engine, is_answered: bool) -> None:
        """A request is over. Not answered: the engine gave nothing, or an error of its own."""
        engine.requests -= 1
        if name is None:
            engine.loose_requests -= 1
            return
        session = self.sessions.get(name)
        if session is None or session.engine is not engine:
            return  # finished or placed anew meanwhile
        session.requests -= 1
        session.used_at = self._clock()
        if is_answered:
            session.is_bound = True
        elif not session.is_bound and session.requests == 0:
            self.finish(name)

    def finish(self, name: str) -> bool:
        """Forget a session; whether it was known. May be called again."""
        session = self.sessions.pop(name, None)
        if session is None:
            return False
        session.engine.sessions -= 1
        return True

    def mark_down(self, engine: Engine) -> None:
        """The engine refuses connections: nothing goes there until a health check succeeds."""
        engine.is_healthy = False

    def _session(self, name: str, tried: Collection[Engine]) -> Session | None:
        """The session, placed anew when it is unknown or its engine is of no use."""
        self._forget_idle()
        session = self.sessions.get(name)
        if session is not None and (session.engine in tried or not session.engine.is_healthy):
            other = self._choose(tried)
            if other is not None and other is not session.engine:
                session.engine.sessions -= 1
                session.engine = other
                session.is_bound = False
                session.requests = 0
                other.sessions += 1
            elif session.engine in tried:
                return None
        elif session is None:
            engine = self._choose(tried)
            if engine is None:
                return None
            session = self.sessions[name] = Session(engine)
            engine.sessions += 1
            if len(self.sessions) > self.max_sessions:
                self.finish(next(iter(self.sessions)))
        session.requests += 1
        session.used_at = self._clock()
        self.sessions.move_to_end(name)
        return session

    def _choose(self, tried: Collection[Engine]) -> Engine | None:
        """The least loaded healthy engine, of equals the one chosen least recently. With none
        healthy the others are tried: one may have come back since its last check."""
        left = [engine for engine in self.engines if engine not in tried]
        candidates = [engine for engine in left if engine.is_healthy] or left
        if not candidates:
            return None
        chosen = min(candidates, key=lambda engine: (engine.load, engine.last_chosen))
        self._choices += 1
        chosen.last_chosen = self._choices
        return chosen

    def _forget_idle(self) -> None:
        limit = self._clock() - self.session_idle_s
        while self.sessions:
            name, session = next(iter(self.sessions.items()))
            if session.used_at > limit or session.requests:
                return
            self.finish(name)
