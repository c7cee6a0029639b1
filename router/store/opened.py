"""The store of one router, opened: in memory, or in Redis where a URL names one."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from noria.service.log import loop_end
from noria.service.tasks import keep_running
from router.connection import background
from router.store.base import LeaseStore, StoreURLError
from router.store.keys import KeyStore
from router.store.memory_keys import MemoryKeys
from router.store.memory_leases import MemoryLeases

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
    """All stores of one router. `shared` is None where it is alone."""

    keys: KeyStore
    leases: LeaseStore
    shared: Shared | None = None

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
    redis_url: str, log: structlog.typing.FilteringBoundLogger
) -> AsyncIterator[Store]:
    """The store for as long as the block; an empty URL: in memory.

    Redis may be away. Raises StoreURLError for a URL that cannot be used, and for any where
    the `redis` package is missing.
    """
    if not redis_url:
        yield Store(MemoryKeys(), MemoryLeases())
        return
    # Here, since a router that is alone needs no package for it.
    try:
        from router.store.redis_connection import redis_connection
        from router.store.redis_keys import RedisKeys
        from router.store.redis_leases import RedisLeases
        from router.store.redis_news import News
    except ImportError:
        missing = "redis-url: the package `redis` is missing; the extra `router` brings it"
        raise StoreURLError(missing) from None

    async with redis_connection(redis_url, log) as connection:
        news = News(connection)
        keys = RedisKeys(connection, news)
        yield Store(keys, RedisLeases(connection), Shared(connection, news))
