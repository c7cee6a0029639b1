"""Who asks, and what they may: an API key from the call's metadata, looked up by its digest.

A call without a key may be known by its client certificate instead: each of the certificate's
names is looked up like a key.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from noria.reasons import Reason, RequestError
from noria.service.limits import MAX_PRIORITY
from router.tenant_limits import UNLIMITED, TenantLimits

_REFUSAL = "the API key is missing, unknown or malformed"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever owns keys, and the scope of these.

    models            names it may ask for; None: all
    methods           methods of the ChatService it may call; None: all
    priority_ceiling  caps the priority of its requests
    cache_group       tenants of one group may share cached prefixes; empty: this one alone
    limits            how much it may ask for
    admin             whether it may call the AdminService
    """

    name: str
    models: frozenset[str] | None = None
    methods: frozenset[str] | None = None
    priority_ceiling: int = MAX_PRIORITY
    cache_group: str = ""
    limits: TenantLimits = UNLIMITED
    admin: bool = False

    def cache_salt(self, secret: bytes) -> bytes:
        """What keeps cached prefixes apart: HMAC-SHA256 of the group, or of the tenant alone."""
        owner = f"group\0{self.cache_group}" if self.cache_group else f"tenant\0{self.name}"
        return hmac.digest(secret, owner.encode(), "sha256")

    def check_method(self, method: str) -> None:
        """Raises METHOD_FORBIDDEN."""
        if self.methods is not None and method not in self.methods:
            raise _forbidden(method)

    def check_admin(self, method: str) -> None:
        """Raises METHOD_FORBIDDEN."""
        if not self.admin:
            raise _forbidden(method)


def _forbidden(method: str) -> RequestError:
    return RequestError(Reason.METHOD_FORBIDDEN, f"the API key may not call {method}")


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key by its digest. `expires_at` is in seconds since the epoch; from then on it is void.

    `key_id` names it in logs and to operators.
    """

    tenant: Tenant
    expires_at: float | None = None
    disabled: bool = False
    key_id: str = ""

    def is_valid(self, now: float) -> bool:
        return not self.disabled and (self.expires_at is None or now < self.expires_at)


Metadata = Iterable[tuple[str, str | bytes]]
# SHA-256 in lower-case hex -> key.
Keys = Mapping[str, ApiKey]
# No key can stand for a certificate: of those with a NUL in them none equals any other.
_CERTIFICATE = b"certificate\0"
_MAX_CERTIFIED = 64
_NOBODY = (b"0" * 64, ApiKey(Tenant(""), disabled=True))


class KeyRing:
    """The known keys, held as digests; no key is kept itself.

    `wall_clock` gives seconds since the epoch, for the keys that expire.
    """

    def __init__(self, keys: Keys, wall_clock: Callable[[], float] = time.time) -> None:
        self._wall_clock = wall_clock
        self._keys: dict[bytes, tuple[bytes, ApiKey]] = {}
        self.replace(keys)

    def replace(self, keys: Keys) -> None:
        """Know these keys, and no others, from the next call on. Running ones go on."""
        self._keys = {digest.encode(): (digest.encode(), key) for digest, key in keys.items()}

    def authenticate(self, metadata: Metadata, certified: Sequence[str] = ()) -> ApiKey:
        """The key that the call carries, as `authorization: Bearer` or `x-api-key`.

        Both may be present if they carry the same key. A call without any is judged by
        `certified`, the names in its client's certificate, which may name one tenant alone.
        Raises INVALID_KEY, with one and the same message whatever is wrong.
        """
        now = self._wall_clock()
        found = [key for each in _presented(metadata, certified) if (key := self._find(each, now))]
        if len({key.tenant.name for key in found}) == 1:
            return found[0]
        raise RequestError(Reason.INVALID_KEY, _REFUSAL)

    def can_tell(self, metadata: Metadata, certified: Sequence[str] = ()) -> bool:
        """Whether what is known here says enough: the key is here, void or not, or it is none."""
        presented = _presented(metadata, certified)
        return presented == [b""] or any(each in self._keys for each in presented)

    def _find(self, presented: bytes, now: float) -> ApiKey | None:
        # The same work whoever asks: one look-up by digest and one comparison. How long a
        # look-up takes tells of the digest at most, from which no key follows.
        known, key = self._keys.get(presented, _NOBODY)
        return key if hmac.compare_digest(known, presented) and key.is_valid(now) else None


def carries_key(metadata: Metadata) -> bool:
    """Whether a call claims to have a key, of whatever form."""
    return any(True for _ in _keys(metadata))


def certificate_sha256(name: str) -> str:
    """Stands for a client certificate's subject alternative name as a key's digest does."""
    return hashlib.sha256(_CERTIFICATE + name.encode()).hexdigest()


def _presented(metadata: Metadata, certified: Sequence[str]) -> list[bytes]:
    """Digests of the one key that a call carries, or else of its certificate's names.

    A single empty one for no key and for several.
    """
    digests = {_digest(key) for key in _keys(metadata)}
    if not digests and certified:
        return [certificate_sha256(name).encode() for name in certified[:_MAX_CERTIFIED]]
    return [digests.pop() if len(digests) == 1 else b""]


def _keys(metadata: Metadata) -> Iterable[bytes]:
    for name, value in metadata:
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        if name == "x-api-key":
            yield _without_nul(raw)
        elif name == "authorization":
            scheme, _, key = raw.partition(b" ")
            # Another scheme is a credential that no key equals, not an absent one.
            yield _without_nul(key) if scheme.lower() == b"bearer" else b"\0" + raw


def _without_nul(key: bytes) -> bytes:
    return b"\0" + key if b"\0" in key else key


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).hexdigest().encode()
