"""Leases in Redis."""

from noria.service import leases
from router.store.redis_connection import RedisConnection, Script

_RENEW, _LIVE = Script(leases.RENEW), Script(leases.LIVE)


class RedisLeases:
    """A `LeaseStore` that all replicas share."""

    def __init__(self, connection: RedisConnection) -> None:
        self._connection = connection

    async def renew(self, kind: str, holder: str, ttl_s: float) -> None:
        keys = [leases.leases_key(kind)]
        await self._connection.evaluate(_RENEW, keys, [holder, round(ttl_s * 1000)])

    async def release(self, kind: str, holder: str) -> None:
        await self._connection.call(lambda client: client.zrem(leases.leases_key(kind), holder))

    async def live(self, kind: str) -> frozenset[str]:
        return frozenset(await self._connection.evaluate(_LIVE, [leases.leases_key(kind)], []))
