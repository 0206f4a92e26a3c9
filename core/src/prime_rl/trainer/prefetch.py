"""Runs an iterator in a background thread, a bounded number of items ahead."""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")
_POLL_S = 0.1


@dataclass(frozen=True)
class _End:
    """The iterator is exhausted, or has failed."""

    error: BaseException | None


class Prefetch(Generic[Item]):
    """Iterates over `source` in a thread of its own, at most `depth` items ahead.

    What the source raises is raised to the consumer in the item's place. With depth 0 there is no
    thread and items are made when they are asked for.
    """

    def __init__(self, source: Generator[Item, None, None], depth: int) -> None:
        self._source = source
        self._items: queue.Queue[Item | _End] = queue.Queue(maxsize=max(1, depth))
        self._is_closed = threading.Event()
        self._thread: threading.Thread | None = None
        if depth > 0:
            self._thread = threading.Thread(target=self._work, name="prefetch", daemon=True)
            self._thread.start()

    def __iter__(self) -> Prefetch[Item]:
        return self

    def __next__(self) -> Item:
        if self._thread is None:
            return next(self._source)
        item = self._items.get()
        if not isinstance(item, _End):
            return item
        self._put(item)
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Stop after the item in the making and close the source. Idempotent."""
        self._is_closed.set()
        if self._thread is None:
            self._source.close()

    def _work(self) -> None:
        error: BaseException | None = None
        try:
            for item in self._source:
                if not self._put(item):
                    return
        except BaseException as raised:  # carried to the consumer, which raises it
            error = raised
        finally:
            self._source.close()
        self._put(_End(error))

    def _put(self, item: Item | _End) -> bool:
        while not self._is_closed.is_set():
            try:
                self._items.put(item, timeout=_POLL_S)
                return True
            except queue.Full:
                continue
        return False
