"""The ledger of one router at work: its writer, its lease, and sweeping after others."""

import contextlib
from collections.abc import AsyncIterator, Callable

import structlog

from noria.service.log import loop_end
from noria.service.tasks import keep_running
from router.connection import background
from router.ledger.ledger import UsageLedger
from router.ledger.prices import Prices
from router.ledger.sweeper import Sweeper
from router.ledger.writer import LedgerWriter
from router.store.base import StoreUnavailableError
from router.store.opened import Store

FLUSH_S = 2.0


class Bookkeeping:
    """`ledger` takes the entries. `lease_s`: after so long a silence others count it as gone."""

    def __init__(
        self,
        router_id: str,
        store: Store,
        prices: Prices,
        *,
        lease_s: float,
        max_rows: int,
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._log = log
        self._writer = LedgerWriter(store.ledger, self._tell, max_rows)
        self._sweeper = Sweeper(
            router_id, store.leases, store.ledger,
            on_lost=self._tell_lost, lease_s=lease_s, clock=clock,
        )  # fmt: skip
        self.ledger = UsageLedger(router_id, prices, self._writer)

    @property
    def waiting(self) -> int:
        """Rows that are not in the store yet."""
        return self._writer.waiting

    @property
    def dropped(self) -> int:
        """Closed rows for which there was no room while the store was away."""
        return self._writer.dropped

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Write and sweep inside the block; on exit what waits is written, for 2 s at most."""
        loops = (self._writer.run, self._sweeper.run)
        try:
            async with background([keep_running(loop, loop_end(self._log)) for loop in loops]):
                yield
        finally:
            await self._finish()

    async def _finish(self) -> None:
        left = await self._writer.flush(FLUSH_S)
        if left:
            self._log.error("ledger_unwritten", rows=left)
        with contextlib.suppress(StoreUnavailableError):
            await self._sweeper.release()

    def _tell(self, event: str, figures: dict[str, int]) -> None:
        tell = self._log.info if event == "ledger_written" else self._log.error
        tell(event, **figures)

    def _tell_lost(self, router_id: str, rows: int) -> None:
        self._log.warning("ledger_rows_lost", router_id=router_id, rows=rows)
