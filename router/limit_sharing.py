"""Tells the shared limits what this router holds, and asks them for its requests.

One exchange at a time, each with everything that came up meanwhile: under load many requests
share a round trip, and none touches the connection itself. A request waits for one exchange,
or for the rest of another before it; while the store is away it waits for none.

Nothing is lost meanwhile, and nothing grows with the time: accounts are absolute, so what is
to be told is one line for each tenant, however often it changed.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace

import structlog

from noria.service.log import loop_end
from noria.service.tasks import keep_running
from router.connection import background
from router.limit_book import Book, Books, Pending
from router.limit_decision import Statement, Verdict
from router.store.base import StoreUnavailableError
from router.store.limits import LimitStore

# News that nobody waits for are gathered for so long.
GATHER_S = 0.02
MAX_UNTOLD = 10_000
_PER_EXCHANGE = 256
_RENEWALS_PER_LEASE = 3
_REST_S = 0.25


@dataclass(slots=True)
class SharingFigures:
    """Exchanges, and those that failed; tenants of whom something is to be told; and how often
    what one had charged was never told, because too many waited.
    """

    exchanges: int = 0
    failed: int = 0
    untold: int = 0
    dropped: int = 0


@dataclass(slots=True, eq=False)
class _Waiting:
    pending: Pending
    verdict: "asyncio.Future[Verdict | None]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class LimitSharing:
    """This router's side of the shared limits; `router` is its instance id.

    `clock` counts seconds. What it holds is leased for `lease_s`.
    """

    def __init__(
        self,
        store: LimitStore,
        books: Books,
        router: str,
        *,
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
        lease_s: float,
    ) -> None:
        self._figures = SharingFigures()
        self._store = store
        self._books = books
        self._router = router
        self._clock = clock
        self._log = log
        self._lease_s = lease_s
        self._asked: list[_Waiting] = []
        # In order, for the oldest to be dropped first.
        self._untold: dict[Book, None] = {}
        self._wake = asyncio.Event()
        self._resting = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def figures(self) -> SharingFigures:
        return replace(self._figures, untold=len(self._untold))

    async def ask(self, pending: Pending) -> Verdict | None:
        """The shared limits' verdict, booked as it comes; None where they are away."""
        book = pending.hold.book
        if self._resting or not self._store.available:
            self._tell_later(book)
            return None
        waiting = _Waiting(pending)
        self._asked.append(waiting)
        if not pending.ask.dry_run:
            book.pending.append(pending)
        self._wake.set()
        try:
            return await waiting.verdict
        finally:
            if pending in book.pending:
                # Whoever asked has left. What the store grants all the same is more than it
                # is told next, and comes back with that.
                book.pending.remove(pending)
                self._asked = [each for each in self._asked if each is not waiting]

    def tell(self, book: Book) -> None:
        """An account has changed: the store is told soon."""
        if book.limits.are_shared or book.known.holds_anything:
            self._tell_later(book)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Share inside the block; whatever is held no more is told at its end."""
        loops = [keep_running(each, loop_end(self._log)) for each in (self.run, self.renew)]
        async with background(loops):
            yield
        with contextlib.suppress(StoreUnavailableError):
            while self._untold and self._store.available:
                await self._exchange()

    async def run(self) -> None:
        """Exchange whenever there is something to tell or to ask."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if not self._store.available:
                await self._wait_out()
            try:
                await self._exchange()
            except StoreUnavailableError:
                await self._rest()
            if self._asked or (self._untold and self._timer is None):
                self._wake.set()

    async def renew(self) -> None:
        """Renew all leases, some times within each: one exchange for many tenants."""
        while True:
            await asyncio.sleep(self._lease_s / _RENEWALS_PER_LEASE)
            self._tell_holding()

    def _tell_holding(self) -> None:
        for book in self._books.holding():
            if book.limits.are_shared:
                self._tell_later(book)

    async def _wait_out(self) -> None:
        """Until the store is back nobody waits for it; what it missed is told then.

        So is all that is held: it may have come back with nothing.
        """
        self._let_go()
        await self._store.wait_available()
        self._tell_holding()
        self._log.info("limits_told_again", tenants=len(self._untold))

    def _tell_later(self, book: Book) -> None:
        self._untold[book] = None
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GATHER_S, self._gathered)
        if len(self._untold) > MAX_UNTOLD:
            self._drop(next(iter(self._untold)))

    def _gathered(self) -> None:
        self._timer = None
        self._wake.set()

    def _drop(self, book: Book) -> None:
        """Tell nothing of what this account charged so far."""
        del self._untold[book]
        book.acknowledge(book.confirmed(), book.known_at)
        if not self._figures.dropped:
            self._log.error("limits_untold_dropped", more_than=MAX_UNTOLD)
        self._figures.dropped += 1

    async def _exchange(self) -> None:
        """One exchange with all that is asked. Raises StoreUnavailableError."""
        asked, self._asked = self._asked, []
        batch = self._batch(asked)
        if not batch:
            return
        statements = [
            self._books.statement(book, tuple(each.pending.ask for each in waiting))
            for book, waiting in batch.items()
        ]
        self._figures.exchanges += 1
        try:
            answers = await self._store.exchange(self._router, statements, self._lease_s)
        except BaseException:
            # Perhaps it was heard: telling the same again changes nothing.
            self._figures.failed += 1
            for book in batch:
                self._tell_later(book)
            for each in asked:
                _answer(each, None)
            raise
        for book, told, verdicts in zip(batch, statements, answers, strict=True):
            self._heard(book, told, verdicts, batch[book])

    def _heard(
        self,
        book: Book,
        told: Statement,
        verdicts: Sequence[Verdict],
        waiting: Sequence[_Waiting],
    ) -> None:
        known = replace(told.account)
        for ask, verdict in zip(told.asks, verdicts, strict=True):
            if verdict.refused_by is None and not ask.dry_run:
                known.add(ask, verdict.tokens)
        book.acknowledge(known, self._clock())
        for each, verdict in zip(waiting, verdicts, strict=True):
            _answer(each, verdict)

    def _batch(self, asked: list[_Waiting]) -> dict[Book, list[_Waiting]]:
        """By tenant: what is asked, and the oldest of what is to be told."""
        batch: dict[Book, list[_Waiting]] = {}
        for each in asked:
            batch.setdefault(each.pending.hold.book, []).append(each)
        for book in self._untold:
            if len(batch) >= _PER_EXCHANGE:
                break
            batch.setdefault(book, [])
        for book in batch:
            self._untold.pop(book, None)
        return batch

    async def _rest(self) -> None:
        """A store that refuses while it is there is not asked for each request anew."""
        self._resting = True
        self._let_go()
        try:
            await asyncio.sleep(_REST_S)
        finally:
            self._resting = False
        self._wake.set()

    def _let_go(self) -> None:
        """Whoever waits goes on with this router's own decision."""
        asked, self._asked = self._asked, []
        for each in asked:
            _answer(each, None)


def _answer(waiting: _Waiting, verdict: Verdict | None) -> None:
    """Book the verdict at once; the request itself goes on a moment later.

    Without a verdict what this router granted stands.
    """
    pending = waiting.pending
    book = pending.hold.book
    if pending in book.pending:
        book.pending.remove(pending)
        if verdict is not None:
            pending.hold.answered(pending.ask, verdict)
    if not waiting.verdict.done():
        waiting.verdict.set_result(verdict)
