"""Changes keys and tenants; each change is told in the log, and holds on this router at once."""

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field

import structlog

from noria.reasons import Reason, RequestError
from noria.service.api_key import key_sha256, new_key
from router.auth import Tenant, certificate_sha256
from router.key_cache import KeyCache
from router.store.base import StoreUnavailableError
from router.store.keys import KeyChange, KeyRecord, KeyStore, NewKey, WallClock


@dataclass(frozen=True, slots=True)
class MadeKey:
    """A key and, this once, the key itself; `is_lasting`: it outlives this router."""

    record: KeyRecord
    api_key: str = field(repr=False)
    is_lasting: bool


@dataclass(frozen=True, slots=True)
class KnownKeys:
    """Tenants by name, and their keys by tenant and age."""

    tenants: Sequence[Tenant]
    keys: Sequence[KeyRecord]


class KeyAdmin:
    """`by` is the id of the key that asks. All methods raise STORE_UNAVAILABLE."""

    def __init__(
        self,
        store: KeyStore,
        cache: KeyCache,
        wall_clock: WallClock,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._store = store
        self._cache = cache
        self._wall_clock = wall_clock
        self._log = log

    async def set_tenant(self, tenant: Tenant, by: str) -> None:
        async with self._changing():
            change = await self._store.set_tenant(tenant, by)
        await self._changed(change)

    async def create(self, tenant: str, label: str, expires_in_s: float | None, by: str) -> MadeKey:
        """Raises INVALID_FIELD for a tenant that there is not, TOO_MANY_KEYS."""
        api_key = new_key()
        made = NewKey(tenant, key_sha256(api_key), label, expires_in_s)
        return await self._create(made, api_key, by)

    async def certify(
        self, tenant: str, name: str, label: str, expires_in_s: float | None, by: str
    ) -> MadeKey:
        """Let a name in client certificates stand for a key; the same errors, and INVALID_FIELD
        for a name that stands for one already, or did.
        """
        made = NewKey(tenant, certificate_sha256(name), label, expires_in_s)
        return await self._create(made, "", by)

    async def _create(self, made: NewKey, api_key: str, by: str) -> MadeKey:
        async with self._changing():
            record, change = await self._store.create(made, by)
        await self._changed(change)
        return MadeKey(record, api_key, self._store.is_lasting)

    async def revoke(self, key_id: str, by: str) -> KeyRecord:
        """Raises KEY_NOT_FOUND."""
        async with self._changing():
            record, change = await self._store.revoke(key_id, by)
        await self._changed(change)
        return record

    async def expire(self, key_id: str, in_s: float | None, by: str) -> KeyRecord:
        """Raises KEY_NOT_FOUND, TOO_MANY_KEYS."""
        async with self._changing():
            record, change = await self._store.expire(key_id, in_s, by)
        await self._changed(change)
        return record

    async def known(self, tenant: str, *, include_void: bool) -> KnownKeys:
        """Those of one tenant, or of all for an empty name."""
        with _asking():
            await self._cache.refresh()
        now = self._wall_clock()
        tenants = [each for each in self._cache.tenants.values() if tenant in ("", each.name)]
        keys = [
            record
            for record in self._cache.records.values()
            if tenant in ("", record.tenant) and (include_void or record.is_live(now))
        ]
        tenants.sort(key=lambda each: each.name)
        keys.sort(key=lambda record: (record.tenant, record.created_at or 0, record.key_id))
        return KnownKeys(tenants, keys)

    async def changes(self, limit: int) -> Sequence[KeyChange]:
        with _asking():
            return await self._store.key_changes(limit)

    @contextlib.asynccontextmanager
    async def _changing(self) -> AsyncIterator[None]:
        """A store that lost its keys takes no change: that would begin it anew, without them."""
        with _asking():
            await self._cache.refresh()
            yield

    async def _changed(self, change: KeyChange | None) -> None:
        if change is None:
            return
        self._log.info(
            "key_changed",
            by=change.by,
            action=change.action,
            tenant=change.tenant,
            key_id=change.key_id,
        )
        with contextlib.suppress(StoreUnavailableError):
            await self._cache.refresh()


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """The store's absence as the request's error."""
    try:
        yield
    except StoreUnavailableError:
        problem = "the store of keys does not answer; what was asked may have been done"
        raise RequestError(Reason.STORE_UNAVAILABLE, problem, retry_after_s=1.0) from None
