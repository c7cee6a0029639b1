"""Keys and tenants as a store keeps them, and what it is asked about them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from noria.reasons import Reason, RequestError, invalid_field
from router.auth import Tenant
from router.store.base import PREFIX

# Two, so that one may take the place of the other while both are taken.
MAX_LIVE_KEYS = 2
# Keys of a tenant that are remembered after they became void.
MAX_VOID_KEYS = 20
# Lines of the account of changes that are kept, or a few more.
MAX_KEY_CHANGES = 10_000
# Who listens there hears that something has changed.
KEYS_CHANNEL = f"{PREFIX}keys"
# Who does what no key asked for.
OPERATOR = ""

WallClock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class KeyRecord:
    """A key without the key: `sha256` is its digest in hex. Times are seconds since the epoch.

    `is_fixed`: it stands in a file and cannot be changed here.
    """

    key_id: str
    sha256: str = field(repr=False)
    tenant: str
    label: str = ""
    created_at: float | None = None
    expires_at: float | None = None
    revoked_at: float | None = None
    is_fixed: bool = False

    def is_live(self, now: float) -> bool:
        return self.revoked_at is None and (self.expires_at is None or now < self.expires_at)


@dataclass(frozen=True, slots=True)
class NewKey:
    """A key to be made: its digest alone, and for how many seconds it is good (None: for ever)."""

    tenant: str
    sha256: str = field(repr=False)
    label: str = ""
    expires_in_s: float | None = None

    @property
    def key_id(self) -> str:
        return key_id_of(self.sha256)


@dataclass(frozen=True, slots=True)
class KeyChange:
    """Who changed what, and when (seconds since the epoch); `by` is a key's id."""

    at: float
    by: str
    action: str
    tenant: str
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class Mark:
    """A state of the store: the `version` of one `epoch`, which ends when its keys are lost."""

    epoch: str
    version: int


@dataclass(frozen=True, slots=True)
class KeyNews:
    """What differs from an earlier state: by name and by id; None: there is none any more.

    `is_whole`: it is everything, and what it does not name is gone. `unreadable` counts
    entries that were left out since they cannot be understood.
    """

    mark: Mark
    is_whole: bool
    tenants: Mapping[str, Tenant | None]
    keys: Mapping[str, KeyRecord | None]
    unreadable: int = 0


class KeyStore(Protocol):
    """Keys and tenants. All methods raise StoreUnavailableError.

    `by` is the id of the key that asks. `is_lasting`: what is changed outlives the process.
    """

    @property
    def is_lasting(self) -> bool: ...

    async def news(self, since: Mark | None) -> KeyNews:
        """What has changed since then; everything where that cannot be told."""
        ...

    async def set_tenant(self, tenant: Tenant, by: str) -> KeyChange:
        """Make it, or give it another scope."""
        ...

    async def create(self, key: NewKey, by: str) -> tuple[KeyRecord, KeyChange]:
        """Raises INVALID_FIELD for a tenant that there is not, TOO_MANY_KEYS."""
        ...

    async def create_first(self, admin: Tenant, key: NewKey) -> tuple[KeyRecord, KeyChange] | None:
        """Make an administrator and its key; None if one with a live key is there."""
        ...

    async def revoke(self, key_id: str, by: str) -> tuple[KeyRecord, KeyChange | None]:
        """End it; no change if it was revoked before. Raises KEY_NOT_FOUND."""
        ...

    async def expire(
        self, key_id: str, in_s: float | None, by: str
    ) -> tuple[KeyRecord, KeyChange | None]:
        """Let it end in `in_s` seconds, or never. Raises KEY_NOT_FOUND; of a key that would
        live again beside two others TOO_MANY_KEYS.
        """
        ...

    async def key_changes(self, limit: int) -> Sequence[KeyChange]:
        """The last ones, newest first."""
        ...


def key_id_of(sha256: str) -> str:
    """A key's name for people, logs and the store: 64 bits of its hash; no key follows from it."""
    return f"key-{sha256[:16]}"


def no_such_key() -> RequestError:
    return RequestError(Reason.KEY_NOT_FOUND, "key_id: no such key")


def no_such_tenant() -> RequestError:
    return invalid_field("tenant", "no such tenant; SetTenant makes one")


def too_many_keys(tenant: str, live: Sequence[str]) -> RequestError:
    told = f"tenant {tenant} has {len(live)} live keys ({', '.join(live)}); at most {MAX_LIVE_KEYS}"
    return RequestError(Reason.TOO_MANY_KEYS, f"{told}: revoke one, or wait until it has expired")


def key_exists() -> RequestError:
    return invalid_field("sha256", "another key has the same, or had it and was revoked")
