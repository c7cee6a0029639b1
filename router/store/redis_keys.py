"""Keys and tenants in Redis, shared by all routers."""

import secrets
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis

from router.auth import Tenant
from router.store import key_scripts
from router.store.base import StoreUnavailableError
from router.store.keys import (
    KEYS_CHANNEL,
    MAX_KEY_CHANGES,
    MAX_LIVE_KEYS,
    MAX_VOID_KEYS,
    OPERATOR,
    KeyChange,
    KeyNews,
    KeyRecord,
    Mark,
    NewKey,
    key_exists,
    no_such_key,
    no_such_tenant,
    too_many_keys,
)
from router.store.redis_connection import RedisConnection, Script
from router.store.redis_news import News
from router.store.tenant_json import key_from_json, tenant_from_json, tenant_to_json

T = TypeVar("T")

# Of ten thousand keys at once; whoever has less patience ends the call.
_NEWS_TIMEOUT_S = 5.0
_AUDIT = key_scripts.NAMES[-1]


class RedisKeys:
    """A `KeyStore`. After each change the others are woken by `news`."""

    is_lasting = True

    def __init__(self, connection: RedisConnection, news: News) -> None:
        self._connection = connection
        self._news = news

    async def news(self, since: Mark | None) -> KeyNews:
        seen: list[str | int] = ["", 0] if since is None else [since.epoch, since.version]
        epoch, version, is_whole, tenants, keys = await self._connection.evaluate(
            key_scripts.NEWS, key_scripts.NAMES, seen, _NEWS_TIMEOUT_S
        )
        if since is not None and since.epoch and not epoch:
            # It came back empty: not the same as somebody having revoked every key.
            raise StoreUnavailableError("the store has lost its keys")
        named = dict(_read(tenants, tenant_from_json))
        known = dict(_read(keys, key_from_json))
        unreadable = _absent(named, tenants) + _absent(known, keys)
        return KeyNews(Mark(epoch, version), bool(is_whole), named, known, unreadable)

    async def set_tenant(self, tenant: Tenant, by: str) -> KeyChange:
        args = [_new_epoch(), tenant.name, tenant_to_json(tenant), by]
        _, _, now = await self._run(key_scripts.SET_TENANT, *args, MAX_KEY_CHANGES)
        await self._tell()
        return KeyChange(now / 1000, by, "set_tenant", tenant.name)

    async def create(self, key: NewKey, by: str) -> tuple[KeyRecord, KeyChange]:
        lasts = _milliseconds(key.expires_in_s)
        args = [key.tenant, key.key_id, key.sha256, key.label, lasts, by]
        status, *answer = await self._run(
            key_scripts.CREATE, *args, MAX_KEY_CHANGES, MAX_LIVE_KEYS, MAX_VOID_KEYS
        )
        if status == "no_tenant":
            raise no_such_tenant()
        if status == "exists":
            raise key_exists()
        if status == "too_many":
            raise too_many_keys(key.tenant, answer)
        return await self._changed(key.key_id, answer, by, "create")

    async def create_first(self, admin: Tenant, key: NewKey) -> tuple[KeyRecord, KeyChange] | None:
        lasts = _milliseconds(key.expires_in_s)
        args = [_new_epoch(), admin.name, tenant_to_json(admin), key.key_id, key.sha256, key.label]
        status, *answer = await self._run(
            key_scripts.CREATE_FIRST, *args, lasts, MAX_KEY_CHANGES, MAX_VOID_KEYS
        )
        if status == "exists":
            return None
        return await self._changed(key.key_id, answer, OPERATOR, "init")

    async def revoke(self, key_id: str, by: str) -> tuple[KeyRecord, KeyChange | None]:
        status, *answer = await self._run(key_scripts.REVOKE, key_id, by, MAX_KEY_CHANGES)
        return await self._altered(status, key_id, answer, by, "revoke")

    async def expire(
        self, key_id: str, in_s: float | None, by: str
    ) -> tuple[KeyRecord, KeyChange | None]:
        status, *answer = await self._run(
            key_scripts.EXPIRE, key_id, _milliseconds(in_s), by, MAX_KEY_CHANGES, MAX_LIVE_KEYS
        )
        return await self._altered(status, key_id, answer, by, "expire")

    async def key_changes(self, limit: int) -> Sequence[KeyChange]:
        async def last(client: Redis) -> Any:
            return await client.xrevrange(_AUDIT, count=limit)

        entries: Any = await self._connection.call(last)
        return [_key_change(fields) for _, fields in entries]

    async def _run(self, script: Script, *args: str | int) -> Any:
        return await self._connection.evaluate(script, key_scripts.NAMES, args)

    async def _altered(
        self, status: str, key_id: str, answer: Sequence[Any], by: str, action: str
    ) -> tuple[KeyRecord, KeyChange | None]:
        if status == "no_key":
            raise no_such_key()
        if status == "too_many":
            raise too_many_keys(answer[0], answer[1:])
        if status == "same":
            return key_from_json(key_id, answer[0]), None
        return await self._changed(key_id, answer, by, action)

    async def _changed(
        self, key_id: str, answer: Sequence[Any], by: str, action: str
    ) -> tuple[KeyRecord, KeyChange]:
        text, now = answer
        record = key_from_json(key_id, text)
        await self._tell()
        return record, KeyChange(now / 1000, by, action, record.tenant, key_id)

    async def _tell(self) -> None:
        """Wake the other routers; those that do not hear of it look by themselves."""
        try:
            await self._news.publish(KEYS_CHANNEL, "changed")
        except StoreUnavailableError:
            # The change is made all the same.
            return


def _key_change(fields: dict[str, str]) -> KeyChange:
    told = [fields.get(name, "") for name in ("by", "action", "tenant", "key_id")]
    return KeyChange(int(fields.get("at_ms", 0)) / 1000, *told)


def _new_epoch() -> str:
    return secrets.token_hex(8)


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else str(round(seconds * 1000))


def _read(flat: Sequence[str], parse: Callable[[str, str], T]) -> Iterator[tuple[str, T | None]]:
    """Names with what stands there; None for what is gone or cannot be understood: void."""
    for name, text in zip(flat[::2], flat[1::2], strict=True):
        try:
            yield name, parse(name, text) if text else None
        except (ValueError, TypeError):
            yield name, None


def _absent(read: dict[str, Any], flat: Sequence[str]) -> int:
    return sum(
        bool(text) and read[name] is None for name, text in zip(flat[::2], flat[1::2], strict=True)
    )
