"""Records of requests that have ended, in Redis."""

import base64
import binascii
from collections.abc import Awaitable, Sequence
from typing import Any

from redis.asyncio import Redis

from router.kept_records import StoredRecord
from router.store.base import PREFIX
from router.store.redis_connection import RedisConnection


class RedisRecords:
    """Each is kept for `ttl_s` seconds from when it was last put."""

    def __init__(self, connection: RedisConnection, ttl_s: float) -> None:
        self._connection = connection
        self._ttl_ms = round(ttl_s * 1000)

    async def put(self, records: Sequence[StoredRecord]) -> None:
        """Raises StoreUnavailableError; they may be put again."""

        def write(client: Redis) -> Awaitable[Any]:
            pipeline = client.pipeline(transaction=False)
            for record in records:
                text = f"{record.tenant}\n{base64.b64encode(record.content).decode()}"
                pipeline.set(_key(record.request_id), text, px=self._ttl_ms)
            return pipeline.execute()

        await self._connection.call(write)

    async def get(self, tenant: str, request_id: str) -> bytes | None:
        """A tenant's own; another's is not told from none. Raises StoreUnavailableError."""
        text: Any = await self._connection.call(lambda client: client.get(_key(request_id)))
        owner, _, content = (text or "").partition("\n")
        if not content or owner != tenant:
            return None
        try:
            return base64.b64decode(content, validate=True)
        except binascii.Error:
            return None


def _key(request_id: str) -> str:
    return f"{PREFIX}record:{request_id}"
