"""The ledger of a router that is alone; it forgets all when it stops."""

from collections.abc import Collection, Sequence
from datetime import date, timedelta

from router.ledger.row import UsageRow
from router.ledger.totals import Counts, Heading, Totals, counts_of, heading_of
from router.store.ledger_store import KEPT, Retention

# Closed rows kept at most, whatever the retention: the oldest go first, the totals stay.
MAX_ROWS = 100_000


class MemoryLedger:
    """A `LedgerStore` within one process."""

    def __init__(self, retention: Retention = KEPT, max_rows: int = MAX_ROWS) -> None:
        self._retention = retention
        self._max_rows = max_rows
        self._open: dict[str, UsageRow] = {}
        self._closed: dict[str, UsageRow] = {}
        self._totals: dict[str, dict[Heading, Counts]] = {}

    async def open(self, rows: Sequence[UsageRow]) -> None:
        for row in rows:
            if row.request_id not in self._closed:
                self._open.setdefault(row.request_id, row)

    async def close(self, rows: Sequence[UsageRow]) -> None:
        for row in rows:
            self._close(row)

    async def orphans(self, live: Collection[str]) -> list[str]:
        return sorted({row.router_id for row in self._open.values()} - set(live))

    async def lose(self, router_id: str, now_us: int) -> int:
        orphaned = [row for row in self._open.values() if row.router_id == router_id]
        for row in orphaned:
            self._close(row.lost(now_us))
        return len(orphaned)

    async def rows(self, day: str) -> list[UsageRow]:
        return [row for row in self._closed.values() if row.day == day]

    async def open_rows(self, router_id: str) -> list[UsageRow]:
        return [row for row in self._open.values() if row.router_id == router_id]

    async def totals(self, days: Sequence[str], tenant: str | None) -> Totals:
        return {
            heading: counts
            for day in days
            for heading, counts in self._totals.get(day, {}).items()
            if tenant is None or heading.tenant == tenant
        }

    def _close(self, row: UsageRow) -> None:
        self._open.pop(row.request_id, None)
        before = self._closed.get(row.request_id)
        if before is not None:
            if not before.gives_way_to(row):
                return
            self._count(before, -counts_of(before))
        self._closed[row.request_id] = row
        self._count(row, counts_of(row))
        while len(self._closed) > self._max_rows:
            del self._closed[next(iter(self._closed))]

    def _count(self, row: UsageRow, counts: Counts) -> None:
        if row.day not in self._totals:
            self._trim(row.day)
        of_day = self._totals.setdefault(row.day, {})
        heading = heading_of(row)
        of_day[heading] = of_day.get(heading, Counts()) + counts

    def _trim(self, today: str) -> None:
        """On each new day; days are compared as text, which ISO dates allow."""
        first_row = _days_before(today, self._retention.row_days)
        self._closed = {i: row for i, row in self._closed.items() if row.day >= first_row}
        first_total = _days_before(today, self._retention.total_days)
        self._totals = {day: kept for day, kept in self._totals.items() if day >= first_total}


def _days_before(day: str, days: int) -> str:
    return (date.fromisoformat(day) - timedelta(days=days)).isoformat()
