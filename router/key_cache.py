"""What this router knows of the store's keys: enough to serve without asking, for a while.

Whoever is known is served from here. Whoever would be refused is so only after the store was
asked whether it knows more, so that a new key works at once. While the store cannot be asked,
keys that are known go on working until what is known is too old.
"""

import asyncio
import contextlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import structlog

from noria.reasons import Reason, RequestError
from router.auth import ApiKey, KeyRing, Metadata, Tenant
from router.store.base import StoreUnavailableError
from router.store.keys import KeyNews, KeyRecord, KeyStore, Mark, WallClock

T = TypeVar("T")

# A revoked key is refused, and what it runs ended, so long after it was revoked at the latest,
# plus the time of one call to the store.
POLL_S = 1.0


class KeyCache:
    """Keys and tenants as last read, taken for true for `max_age_s`. A call waits `patience_s`
    at most for the store to say more. `on_revoked` hears which keys were revoked, once;
    `on_change` when `is_usable` has become another.
    """

    def __init__(
        self,
        store: KeyStore,
        *,
        max_age_s: float,
        patience_s: float,
        on_revoked: Callable[[frozenset[str]], None],
        on_change: Callable[[], None],
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
        wall_clock: WallClock = time.time,
    ) -> None:
        self.ring = KeyRing({}, wall_clock)
        self.tenants: dict[str, Tenant] = {}
        self.records: dict[str, KeyRecord] = {}
        self._store = store
        self._max_age_s = max_age_s
        self._patience_s = patience_s
        self._on_revoked = on_revoked
        self._on_change = on_change
        self._clock = clock
        self._wall_clock = wall_clock
        self._log = log
        self._mark: Mark | None = None
        self._read_at: float | None = None
        self._was_usable = False
        self._problem = ""
        self._reading = asyncio.Lock()
        self._numbers = itertools.count()
        self._last_begun = -1
        self._woken = asyncio.Event()

    @property
    def is_usable(self) -> bool:
        """Whether keys were read, and not too long ago."""
        return self._read_at is not None and self._clock() - self._read_at <= self._max_age_s

    async def authenticate(self, metadata: Metadata, certified: Sequence[str] = ()) -> ApiKey:
        """The key that a call carries, or that the names in its client's certificate stand for.

        Raises INVALID_KEY, STORE_UNAVAILABLE.
        """
        if self.is_usable:
            with contextlib.suppress(RequestError):
                return self.ring.authenticate(metadata, certified)
        try:
            async with asyncio.timeout(self._patience_s):
                await self.refresh()
        except (StoreUnavailableError, TimeoutError):
            if not (self.is_usable and self.ring.can_tell(metadata, certified)):
                raise _cannot_tell() from None
        return self.ring.authenticate(metadata, certified)

    async def refresh(self) -> None:
        """Know what the store knows now. Raises StoreUnavailableError.

        However many wait, one read is under way at a time, and one that began after all of
        them came serves them all.
        """
        came = next(self._numbers)
        async with self._reading:
            if self._last_begun > came:
                return
            begun = next(self._numbers)
            try:
                news = await self._store.news(self._mark)
            except StoreUnavailableError as error:
                self._tell(str(error))
                raise
            self._take(news)
            self._last_begun = begun

    def wake(self) -> None:
        """Something has changed: look now rather than at the next turn."""
        self._woken.set()

    async def follow(self) -> None:
        """Look again and again; may be cancelled at any time and begun anew."""
        while True:
            self._woken.clear()
            with contextlib.suppress(StoreUnavailableError):
                await self.refresh()
            self._check_usable()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._woken.wait()

    def _take(self, news: KeyNews) -> None:
        self._read_at = self._clock()
        self._tell("")
        if news.mark == self._mark:
            return
        self._mark = news.mark
        tenants: dict[str, Tenant | None] = {**self.tenants, **news.tenants}
        records: dict[str, KeyRecord | None] = {**self.records, **news.keys}
        before = self.records
        self.tenants = _present(news.tenants if news.is_whole else tenants)
        self.records = _present(news.keys if news.is_whole else records)
        self._replace_ring()
        self._end_revoked(before)
        self._log.info("keys_read", keys=len(self.records), unreadable=news.unreadable)
        self._check_usable()

    def _replace_ring(self) -> None:
        self.ring.replace(
            {
                record.sha256: ApiKey(
                    self.tenants[record.tenant],
                    record.expires_at,
                    record.revoked_at is not None,
                    record.key_id,
                )
                for record in self.records.values()
                if record.tenant in self.tenants
            }
        )

    def _end_revoked(self, before: dict[str, KeyRecord]) -> None:
        revoked = {
            key_id
            for key_id, record in self.records.items()
            if record.revoked_at is not None
            and (key_id not in before or before[key_id].revoked_at is None)
        }
        # One that was live and is forgotten was revoked and then became one of too many.
        now = self._wall_clock()
        forgotten = {
            key_id
            for key_id, record in before.items()
            if key_id not in self.records and not record.is_fixed and record.is_live(now)
        }
        if revoked or forgotten:
            self._on_revoked(frozenset(revoked | forgotten))

    def _check_usable(self) -> None:
        if self.is_usable != self._was_usable:
            self._was_usable = self.is_usable
            self._on_change()

    def _tell(self, problem: str) -> None:
        if problem and problem != self._problem:
            self._log.warning("keys_unread", reason=problem)
        self._problem = problem


def _present(found: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in found.items() if value is not None}


def _cannot_tell() -> RequestError:
    problem = "the store of keys does not answer, and this key is not known here"
    return RequestError(Reason.STORE_UNAVAILABLE, problem, retry_after_s=1.0)
