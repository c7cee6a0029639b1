"""Keys and tenants within one process: those of a keys file, and those made since the start."""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace

from noria.reasons import RequestError, invalid_field
from router.auth import Keys, Tenant
from router.store.keys import (
    MAX_KEY_CHANGES,
    MAX_LIVE_KEYS,
    MAX_VOID_KEYS,
    OPERATOR,
    KeyChange,
    KeyNews,
    KeyRecord,
    Mark,
    NewKey,
    WallClock,
    key_exists,
    key_id_of,
    no_such_key,
    no_such_tenant,
    too_many_keys,
)


class MemoryKeys:
    """A `KeyStore` of this router alone. What stands in the file is changed in the file."""

    is_lasting = False

    def __init__(self, keys: Keys | None = None, wall_clock: WallClock = time.time) -> None:
        self._wall_clock = wall_clock
        self._tenants: dict[str, Tenant] = {}
        self._keys: dict[str, KeyRecord] = {}
        self._fixed_tenants: dict[str, Tenant] = {}
        self._fixed_keys: dict[str, KeyRecord] = {}
        self._changes: deque[KeyChange] = deque(maxlen=MAX_KEY_CHANGES)
        self._version = 0
        self.load(keys or {})

    def load(self, keys: Keys) -> None:
        """These keys, and no others, stand in the file now."""
        self._fixed_tenants = {key.tenant.name: key.tenant for key in keys.values()}
        self._fixed_keys = {
            key_id_of(digest): KeyRecord(
                key_id_of(digest),
                digest,
                key.tenant.name,
                expires_at=0.0 if key.disabled else key.expires_at,
                is_fixed=True,
            )
            for digest, key in keys.items()
        }
        self._version += 1

    async def news(self, since: Mark | None) -> KeyNews:
        mark = Mark("memory", self._version)
        if mark == since:
            return KeyNews(mark, False, {}, {})
        tenants, keys = self._tenants | self._fixed_tenants, self._keys | self._fixed_keys
        return KeyNews(mark, True, tenants, keys)

    async def set_tenant(self, tenant: Tenant, by: str) -> KeyChange:
        self._check_free(tenant.name)
        self._tenants[tenant.name] = tenant
        return self._changed(by, "set_tenant", tenant.name)

    async def create(self, key: NewKey, by: str) -> tuple[KeyRecord, KeyChange]:
        self._check_free(key.tenant)
        if key.tenant not in self._tenants:
            raise no_such_tenant()
        if key.key_id in self._keys or key.key_id in self._fixed_keys:
            raise key_exists()
        self._check_room(key.tenant)
        return self._made(key), self._changed(by, "create", key.tenant, key.key_id)

    async def create_first(self, admin: Tenant, key: NewKey) -> tuple[KeyRecord, KeyChange] | None:
        now = self._wall_clock()
        tenants = self._tenants | self._fixed_tenants
        admins = {name for name, tenant in tenants.items() if tenant.admin}
        known = self._all_keys()
        if any(each.tenant in admins and each.is_live(now) for each in known):
            return None
        if any(each.key_id == key.key_id for each in known):
            return None
        self._check_free(admin.name)
        self._tenants[admin.name] = admin
        return self._made(key), self._changed(OPERATOR, "init", admin.name, key.key_id)

    async def revoke(self, key_id: str, by: str) -> tuple[KeyRecord, KeyChange | None]:
        record = self._changeable(key_id)
        if record.revoked_at is not None:
            return record, None
        self._keys[key_id] = replace(record, revoked_at=self._wall_clock())
        return self._keys[key_id], self._changed(by, "revoke", record.tenant, key_id)

    async def expire(
        self, key_id: str, in_s: float | None, by: str
    ) -> tuple[KeyRecord, KeyChange | None]:
        record, now = self._changeable(key_id), self._wall_clock()
        if record.revoked_at is not None:
            return record, None
        if not record.is_live(now) and in_s != 0:
            self._check_room(record.tenant)
        self._keys[key_id] = replace(record, expires_at=None if in_s is None else now + in_s)
        return self._keys[key_id], self._changed(by, "expire", record.tenant, key_id)

    async def key_changes(self, limit: int) -> Sequence[KeyChange]:
        return list(self._changes)[: -limit - 1 : -1]

    def _made(self, key: NewKey) -> KeyRecord:
        now = self._wall_clock()
        ends = None if key.expires_in_s is None else now + key.expires_in_s
        record = KeyRecord(key.key_id, key.sha256, key.tenant, key.label, now, ends)
        void = [each for each in self._of(key.tenant) if not each.is_live(now)]
        for each in void[: max(0, len(void) - MAX_VOID_KEYS)]:
            del self._keys[each.key_id]
        self._keys[key.key_id] = record
        return record

    def _changed(self, by: str, action: str, tenant: str, key_id: str = "") -> KeyChange:
        self._version += 1
        change = KeyChange(self._wall_clock(), by, action, tenant, key_id)
        self._changes.append(change)
        return change

    def _all_keys(self) -> Iterable[KeyRecord]:
        return [*self._keys.values(), *self._fixed_keys.values()]

    def _of(self, tenant: str) -> list[KeyRecord]:
        """Its keys, oldest first."""
        return [record for record in self._keys.values() if record.tenant == tenant]

    def _check_room(self, tenant: str) -> None:
        now = self._wall_clock()
        live = [record.key_id for record in self._of(tenant) if record.is_live(now)]
        if len(live) >= MAX_LIVE_KEYS:
            raise too_many_keys(tenant, live)

    def _check_free(self, tenant: str) -> None:
        if tenant in self._fixed_tenants:
            raise _fixed("tenant")

    def _changeable(self, key_id: str) -> KeyRecord:
        if key_id in self._fixed_keys:
            raise _fixed("key_id")
        if key_id not in self._keys:
            raise no_such_key()
        return self._keys[key_id]


def _fixed(field: str) -> RequestError:
    return invalid_field(field, "stands in the keys file of this router; change it there")
