"""Writes rows to the store, beside the requests and never in their way.

Rows go out as soon as they come; while one batch is on its way the next one gathers. Openings
never wait for closings: a router that is killed takes those with it that were not written yet.
While the store is away all wait in the buffer.
"""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from noria.service.tasks import all_of
from router.ledger.buffer import RowBuffer
from router.ledger.row import UsageRow
from router.store.base import StoreUnavailableError
from router.store.ledger_store import LedgerStore

BATCH = 50
MAX_ROWS = 20_000
_FIRST_DELAY_S = 0.05
_MAX_DELAY_S = 1.0

# An event's name, and figures.
Tell = Callable[[str, dict[str, int]], None]


@dataclass(frozen=True, slots=True)
class _Lane:
    """Rows of one kind: the `first` so many of those that wait, and where they go."""

    first: Callable[[int], list[UsageRow]]
    write: Callable[[Sequence[UsageRow]], Awaitable[None]]
    news: asyncio.Event = field(default_factory=asyncio.Event)


class LedgerWriter:
    """One router's way to the ledger. `tell` hears once when the store falls away, when the
    buffer first overflows, and when all has been written again.
    """

    def __init__(self, store: LedgerStore, tell: Tell, max_rows: int = MAX_ROWS) -> None:
        self._store = store
        self._tell = tell
        self._buffer = RowBuffer(max_rows)
        self._lanes = (
            _Lane(self._buffer.openings, store.open),
            _Lane(self._buffer.closings, store.close),
        )
        self._behind = False
        self._told_dropped = 0

    @property
    def waiting(self) -> int:
        """Rows that are not in the store yet."""
        return len(self._buffer)

    @property
    def dropped(self) -> int:
        """Closings for which there was no room."""
        return self._buffer.dropped

    def open(self, row: UsageRow) -> None:
        self._buffer.open(row)
        self._lanes[0].news.set()

    def close(self, row: UsageRow) -> None:
        self._buffer.close(row)
        self._lanes[1].news.set()
        if self.dropped and not self._told_dropped:
            self._told_dropped = self.dropped
            self._tell("ledger_overflow", {"waiting": self.waiting})

    async def run(self) -> None:
        """Write what comes until cancelled; what a cancelled write had begun is written again."""
        await all_of(*map(self._keep_writing, self._lanes))

    async def flush(self, timeout_s: float) -> int:
        """Write what waits, for so long at most; how many rows are left."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.waiting:
                    written = [await self._write_batch(lane) for lane in self._lanes]
                    if not all(written):
                        await asyncio.sleep(_FIRST_DELAY_S)
        return self.waiting

    async def _keep_writing(self, lane: "_Lane") -> None:
        delay = _FIRST_DELAY_S
        while True:
            await lane.news.wait()
            if await self._write_batch(lane):
                delay = _FIRST_DELAY_S
                continue
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, _MAX_DELAY_S)

    async def _write_batch(self, lane: "_Lane") -> bool:
        """Write the oldest rows of a lane; whether the store took them."""
        lane.news.clear()
        rows = lane.first(BATCH)
        try:
            if rows:
                await lane.write(rows)
        except StoreUnavailableError:
            lane.news.set()
            self._fall_behind()
            return False
        self._buffer.written(rows)
        if lane.first(1):
            lane.news.set()
        if not self.waiting:
            self._catch_up()
        return True

    def _fall_behind(self) -> None:
        if not self._behind:
            self._behind = True
            self._tell("ledger_behind", {"waiting": self.waiting})

    def _catch_up(self) -> None:
        if self._behind or self._told_dropped:
            self._behind, self._told_dropped = False, 0
            self._tell("ledger_written", {"dropped": self.dropped})
