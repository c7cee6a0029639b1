"""A mergeable outbox: what waits for one slow reader stays small.

Every hop holds one per stream, with one writer. A reader that keeps up gets
each item as it comes; for a slow one, neighbours merge, so that a later message
carries more (the idea of vLLM's `RequestOutputCollector`).
"""

import asyncio
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class OutboxClosedError(Exception):
    """The outbox was closed and holds nothing more."""


class Outbox(Generic[T]):
    """Items for one writer, merged while they wait. One event loop only.

    `merge(last, new)` folds `new` into `last` and says True, or says False if the
    two must stay apart.
    """

    def __init__(
        self,
        merge: Callable[[T, T], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._merge = merge
        self._clock = clock
        self._items: list[T] = []
        self._closed = False
        self._wake = asyncio.Event()
        self._nonempty_since: float | None = None

    def put(self, item: T) -> None:
        """Add an item; after `close` it is dropped, since nobody reads."""
        if self._closed:
            return
        if self._nonempty_since is None:
            self._nonempty_since = self._clock()
        if not (self._items and self._merge(self._items[-1], item)):
            self._items.append(item)
        self._wake.set()

    def close(self) -> None:
        """No more items; what is here can still be taken."""
        self._closed = True
        self._wake.set()

    async def take(self) -> list[T]:
        """Wait for items and take all of them, oldest first.

        Raises OutboxClosedError once it is closed and empty.
        """
        while not self._items:
            if self._closed:
                raise OutboxClosedError
            self._wake.clear()
            await self._wake.wait()
        items, self._items = self._items, []
        self._nonempty_since = None
        return items

    def waiting_s(self) -> float:
        """Seconds for which something has been waiting here; 0 when empty."""
        return 0.0 if self._nonempty_since is None else self._clock() - self._nonempty_since
