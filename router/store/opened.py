"""The store of one router, opened: in memory, or in Redis where a URL names one."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from noria.service.log import loop_end
from noria.service.tasks import keep_running
from router.auth import Keys
from router.connection import background
from router.store.base import CALL_TIMEOUT_S, LeaseStore, StoreURLError
from router.store.keys import KeyStore
from router.store.ledger_store import KEPT, LedgerStore, Retention
from router.store.limits import LimitStore
from router.store.memory_keys import MemoryKeys
from router.store.memory_leases import MemoryLeases
from router.store.memory_ledger import MemoryLedger

if TYPE_CHECKING:
    from router.store.redis_connection import RedisConnection
    from router.store.redis_news import News


@dataclass(frozen=True, slots=True)
class Shared:
    """The Redis that this router shares with others, and what wakes it."""

    connection: "RedisConnection"
    news: "News"


@dataclass(frozen=True, slots=True)
class Store:
    """All stores of one router. `shared` is None where it is alone.

    `file_keys` takes what a keys file says; it is `keys` where there is a file or no Redis.
    """

    keys: KeyStore
    leases: LeaseStore
    ledger: LedgerStore
    file_keys: MemoryKeys
    shared: Shared | None = None
    limits: LimitStore | None = None

    @property
    def available(self) -> bool:
        """Whether it can be asked now; one in memory always can."""
        return self.shared is None or self.shared.connection.available

    @contextlib.asynccontextmanager
    async def running(self, log: structlog.typing.FilteringBoundLogger) -> AsyncIterator[None]:
        """Hear of what others did inside the block; listeners have to be named before."""
        if self.shared is None:
            yield
            return
        async with background([keep_running(self.shared.news.run, loop_end(log))]):
            yield


@contextlib.asynccontextmanager
async def open_store(
    redis_url: str,
    log: structlog.typing.FilteringBoundLogger,
    keys: Keys | None = None,
    *,
    timeout_s: float = CALL_TIMEOUT_S,
    retention: Retention = KEPT,
) -> AsyncIterator[Store]:
    """The store for as long as the block; an empty URL: in memory.

    `keys` are those of a file, and then the only ones besides what is made in this process.
    A call to Redis takes `timeout_s` at most. The ledger is kept for `retention`.
    Redis may be away. Raises StoreURLError for a URL that cannot be used, and for any where
    the `redis` package is missing.
    """
    file_keys = MemoryKeys(keys)
    if not redis_url:
        yield Store(file_keys, MemoryLeases(), MemoryLedger(retention), file_keys)
        return
    # Here, since a router that is alone needs no package for it.
    try:
        from router.store.redis_connection import redis_connection
        from router.store.redis_keys import RedisKeys
        from router.store.redis_leases import RedisLeases
        from router.store.redis_ledger import RedisLedger
        from router.store.redis_limits import RedisLimits
        from router.store.redis_news import News
    except ImportError:
        missing = "redis-url: the package `redis` is missing; the extra `router` brings it"
        raise StoreURLError(missing) from None

    async with redis_connection(redis_url, log, timeout_s=timeout_s) as connection:
        news = News(connection)
        shared_keys = RedisKeys(connection, news) if keys is None else file_keys
        ledger = RedisLedger(connection, retention)
        yield Store(
            shared_keys,
            RedisLeases(connection),
            ledger,
            file_keys,
            Shared(connection, news),
            RedisLimits(connection),
        )
