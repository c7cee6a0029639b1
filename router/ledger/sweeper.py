"""Keeps this router's lease, and closes the rows of routers that let theirs run out."""

import asyncio
import random
import time
from collections.abc import Callable

from router.store.base import LeaseStore, StoreUnavailableError
from router.store.ledger_store import LedgerStore

ROUTERS = "routers"
LEASE_S = 15.0


class Sweeper:
    """Any router sweeps after any other. `on_lost` hears of a router and how many rows it left.

    It sweeps once its own lease has been kept up for as long as a lease lasts: after an outage
    of the store everybody's has run out, and those that live renew theirs first.
    """

    def __init__(
        self,
        router_id: str,
        leases: LeaseStore,
        ledger: LedgerStore,
        *,
        on_lost: Callable[[str, int], None],
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._router_id = router_id
        self._leases = leases
        self._ledger = ledger
        self._on_lost = on_lost
        self._lease_s = lease_s
        self._clock = clock
        self._wall_clock = wall_clock
        self._held_since: float | None = None

    async def run(self) -> None:
        """Renew and sweep three times in a lease, until cancelled; without the store, later."""
        while True:
            try:
                await self.turn()
            except StoreUnavailableError:
                self._held_since = None
            # Routers that were started together do not sweep together.
            await asyncio.sleep(self._lease_s / 3 * random.uniform(0.7, 1.0))

    async def turn(self) -> int:
        """Renew, and sweep if it may be done; how many rows that closed.

        Raises StoreUnavailableError.
        """
        now = self._clock()
        await self._leases.renew(ROUTERS, self._router_id, self._lease_s)
        if self._held_since is None:
            self._held_since = now
        if now - self._held_since < self._lease_s:
            return 0
        return await self._sweep()

    async def release(self) -> None:
        """Be gone: what rows are left open are lost, as far as anybody can tell."""
        await self._leases.release(ROUTERS, self._router_id)

    async def _sweep(self) -> int:
        live = await self._leases.live(ROUTERS)
        swept = 0
        # Never its own: a lease that ran out for want of the store says nothing of itself.
        for router_id in await self._ledger.orphans({*live, self._router_id}):
            closed = 0
            while count := await self._ledger.lose(router_id, int(self._wall_clock() * 1e6)):
                closed += count
            if closed:
                self._on_lost(router_id, closed)
            swept += closed
        return swept
