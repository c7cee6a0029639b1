"""Writes rows to the store, beside the requests and never in their way.

Rows go out as soon as they come; while one batch is on its way the next one gathers. While the
store is away they wait in the buffer.
"""

import asyncio
import random
from collections.abc import Callable

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


class LedgerWriter:
    """One router's way to the ledger. `tell` hears once when the store falls away, when the
    buffer first overflows, and when all has been written again.
    """

    def __init__(self, store: LedgerStore, tell: Tell, max_rows: int = MAX_ROWS) -> None:
        self._store = store
        self._tell = tell
        self._buffer = RowBuffer(max_rows)
        self._news = asyncio.Event()
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
        self._news.set()

    def close(self, row: UsageRow) -> None:
        self._buffer.close(row)
        self._news.set()
        if self.dropped and not self._told_dropped:
            self._told_dropped = self.dropped
            self._tell("ledger_overflow", {"waiting": self.waiting})

    async def run(self) -> None:
        """Write what comes until cancelled; what a cancelled write had begun is written again."""
        delay = _FIRST_DELAY_S
        while True:
            await self._news.wait()
            if await self.write_batch():
                delay = _FIRST_DELAY_S
                continue
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(delay * 2, _MAX_DELAY_S)

    async def flush(self, timeout_s: float) -> int:
        """Write what waits, for so long at most; how many rows are left."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.waiting:
                    if not await self.write_batch():
                        await asyncio.sleep(_FIRST_DELAY_S)
        except TimeoutError:
            pass
        return self.waiting

    async def write_batch(self) -> bool:
        """Write the oldest rows; whether the store took them."""
        self._news.clear()
        openings, closings = self._buffer.first(BATCH)
        try:
            if openings:
                await self._store.open(openings)
            if closings:
                await self._store.close(closings)
        except StoreUnavailableError:
            self._news.set()
            self._fall_behind()
            return False
        self._buffer.written(openings, closings)
        if self.waiting:
            self._news.set()
        else:
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
