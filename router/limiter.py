"""Admission by a tenant's limits: what a request takes, and what it is told if it may not.

This router decides first, at once; what it refuses costs nobody a round trip. What it grants
is asked of the shared limits where there are some and they can be asked.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from noria.reasons import Reason, RequestError
from router.auth import Tenant
from router.limit_book import Book, Books, Hold, Pending
from router.limit_decision import Ask, Limit, Verdict
from router.tenant_limits import TenantLimits


class Sharing(Protocol):
    """The shared limits, as `LimitSharing` has them."""

    async def ask(self, pending: Pending) -> Verdict | None: ...

    def tell(self, book: Book) -> None: ...


FillObserver = Callable[[float], None]
_FORGET_INTERVAL_S = 10.0


def _ignore(fill: float) -> None:
    del fill


class Limiter:
    """Grants and refuses what tenants ask for; `sharing` None: this router is alone.

    `on_fill` hears what part of a tenant's tokens per minute each admission left.
    """

    def __init__(
        self, books: Books, sharing: Sharing | None = None, on_fill: FillObserver = _ignore
    ) -> None:
        self._books = books
        self._sharing = sharing
        self._on_fill = on_fill

    @property
    def num_holds(self) -> int:
        """Requests that hold something."""
        return self._books.num_holds

    def hold(self, tenant: Tenant, used: Callable[[], int]) -> Hold:
        """What a request of this tenant will hold, empty so far; `used` as `Hold` has it."""
        book = self._books.of(tenant.name, tenant.limits)
        return Hold(book, used, self._changed)

    async def take(self, hold: Hold, ask: Ask) -> None:
        """Give a request what it asks for.

        Raises RequestError with the reason of the limit that refuses; nothing is taken then.
        """
        limits = hold.book.limits
        verdict = self._books.decide(hold, ask)
        if self._sharing is not None and limits.are_shared and verdict.refused_by is None:
            pending = Pending(hold, replace(ask, wanted=verdict.tokens))
            verdict = await self._sharing.ask(pending) or verdict
        if verdict.refused_by is not None:
            raise _refusal(verdict.refused_by, verdict, ask, limits)
        if limits.tokens_per_minute is not None:
            self._on_fill(verdict.left / limits.tokens_per_minute)

    async def fit(self, hold: Hold, price: int) -> None:
        """Reserve the exact price, in tokens, once it is known; raises like `take`."""
        missing = price - hold.tokens
        if missing > 0:
            await self.take(hold, Ask(needed=missing, wanted=missing))
        else:
            hold.keep(price)

    async def forget_idle(self) -> None:
        """Forget tenants that nothing is held of, every now and then until cancelled."""
        while True:
            await asyncio.sleep(_FORGET_INTERVAL_S)
            self._books.forget_idle()

    def _changed(self, book: Book) -> None:
        if self._sharing is not None:
            self._sharing.tell(book)


def _refusal(limit: Limit, verdict: Verdict, ask: Ask, limits: TenantLimits) -> RequestError:
    name = limit.name.lower()
    needed = {
        Limit.REQUESTS_PER_MINUTE: ask.requests,
        Limit.TOKENS_PER_MINUTE: ask.needed,
        Limit.CONCURRENT_REQUESTS: ask.concurrent,
        Limit.CONCURRENT_ENCODES: ask.encodes,
    }[limit]
    told = f"{needed} more needed, {verdict.left} left of {getattr(limits, name)}"
    return RequestError(
        Reason[limit.name],
        f"{name}: {told}",
        retry_after_s=verdict.wait_ms / 1000,
        quota=(name, told),
    )
