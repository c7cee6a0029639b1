"""A worker's lease in Redis, by which routers find it.

It is renewed for as long as the worker serves and given up before it drains. A worker without
Redis serves on: its routers stay connected, and it registers again when Redis is back.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Protocol

import structlog

from noria.service import leases
from noria.service.log import loop_end
from noria.service.tasks import keep_running

TTL_S = 10.0
RENEW_S = 2.0
_RETRY_S = 0.5
_TIMEOUT_S = 1.0


class Lease(Protocol):
    """What a worker does about being found."""

    def begin(self) -> None:
        """Be found from now on."""

    async def leave(self) -> None:
        """Be found no more; may be called again, and without `begin`."""


class NoLease:
    """Of a worker whose address its routers are told."""

    def begin(self) -> None:
        pass

    async def leave(self) -> None:
        pass


class RedisLease:
    """A lease of `address`; `redis_lease` makes one."""

    def __init__(self, url: str, address: str, log: structlog.typing.FilteringBoundLogger) -> None:
        # Here, since only who has a lease needs the package.
        from redis.asyncio import Redis
        from redis.asyncio.retry import Retry
        from redis.backoff import NoBackoff

        self._client = Redis.from_url(
            url,
            socket_timeout=_TIMEOUT_S,
            socket_connect_timeout=_TIMEOUT_S,
            retry=Retry(NoBackoff(), 0),
            protocol=2,
        )
        self._client.connection_pool.make_connection()  # type: ignore[no-untyped-call]
        self._address = address
        self._log = log
        self._key = leases.leases_key(leases.WORKERS)
        self._renewing: asyncio.Task[None] | None = None
        self._is_held = False

    def begin(self) -> None:
        if self._renewing is None:
            kept = keep_running(self._renew, loop_end(self._log))
            self._renewing = asyncio.create_task(kept)

    async def leave(self) -> None:
        task, self._renewing = self._renewing, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait({task})
        with contextlib.suppress(Exception):
            async with asyncio.timeout(_TIMEOUT_S):
                await self._client.zrem(self._key, self._address)

    async def close(self) -> None:
        """Give it up, and the connection."""
        await self.leave()
        with contextlib.suppress(Exception):
            await self._client.aclose()

    async def _renew(self) -> None:
        while True:
            held = await self._renewed()
            if held != self._is_held:
                self._is_held = held
                self._log.info("registered" if held else "not_registered", address=self._address)
            await asyncio.sleep(RENEW_S if held else _RETRY_S)

    async def _renewed(self) -> bool:
        from redis.exceptions import RedisError

        try:
            async with asyncio.timeout(2 * _TIMEOUT_S):
                ttl_ms = round(TTL_S * 1000)
                await self._client.eval(leases.RENEW, 1, self._key, self._address, ttl_ms)
        except (RedisError, OSError, TimeoutError):
            return False
        return True


@contextlib.asynccontextmanager
async def worker_lease(
    url: str, address: str, log: structlog.typing.FilteringBoundLogger
) -> AsyncIterator[Lease]:
    """The lease of the worker at `address`, given up with the block; an empty URL: none.

    Raises ValueError for a URL that cannot be used, which it does not repeat, and where the
    package `redis` is missing.
    """
    if not url:
        yield NoLease()
        return
    try:
        lease = RedisLease(url, address, log)
    except ImportError:
        missing = "redis-url: the package `redis` is missing; the extra `worker` brings it"
        raise ValueError(missing) from None
    except (ValueError, TypeError):
        raise ValueError("redis-url: not a URL of Redis, or with an unknown option") from None
    try:
        yield lease
    finally:
        await lease.close()
