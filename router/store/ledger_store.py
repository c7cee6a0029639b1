"""What the ledger asks of its store, and how long things stay in it."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from router.ledger.row import UsageRow
from router.ledger.totals import Totals

DAY_S = 24 * 3600


@dataclass(frozen=True, slots=True)
class Retention:
    """For how many days after theirs rows and daily totals are kept, at least."""

    row_days: int = 14
    total_days: int = 400


KEPT = Retention()


class LedgerStore(Protocol):
    """Rows and their totals. Every method raises StoreUnavailableError.

    All that is written may be written again: nothing is counted twice.
    """

    async def open(self, rows: Sequence[UsageRow]) -> None:
        """Keep rows of requests that go on; one that is closed already stays so."""

    async def close(self, rows: Sequence[UsageRow]) -> None:
        """Close rows by the rules of `router.ledger.row`, opened before or not."""

    async def orphans(self, live: Collection[str]) -> list[str]:
        """Routers that have open rows and are not among the live ones."""
        ...

    async def lose(self, router_id: str, now_us: int) -> int:
        """Close some of a router's open rows as LOST; how many this call closed. One that is no
        row is dropped, and counts as closed.

        Whoever else does the same at the same time closes others. Of a router without open rows
        nothing is kept.
        """
        ...

    async def rows(self, day: str) -> list[UsageRow]:
        """The closed rows of a day that are still kept."""
        ...

    async def open_rows(self, router_id: str) -> list[UsageRow]:
        """A router's rows that are open."""
        ...

    async def totals(self, days: Sequence[str], tenant: str | None) -> Totals:
        """Those of these days, of one tenant or of all."""
        ...
