"""Who asks: an API key from the call's metadata, looked up by its digest."""

import hashlib
import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from noria.reasons import Reason, RequestError
from noria.service.limits import MAX_PRIORITY

_REFUSAL = "the API key is missing, unknown or malformed"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Whoever owns a key. `priority_ceiling` caps the priority of its requests."""

    name: str
    priority_ceiling: int = MAX_PRIORITY


class KeyRing:
    """The known keys, held as SHA-256 digests in lower-case hex; no key is kept itself."""

    def __init__(self, tenants: Mapping[str, Tenant]) -> None:
        self._tenants = {digest.encode(): tenant for digest, tenant in tenants.items()}

    def authenticate(self, metadata: Iterable[tuple[str, str | bytes]]) -> Tenant:
        """The tenant whose key the call carries, as `authorization: Bearer` or `x-api-key`.

        Both may be present if they carry the same key. Raises INVALID_KEY, with one and
        the same message whatever is wrong.
        """
        digests = {_digest(key) for key in _keys(metadata)}
        if len(digests) == 1:
            presented = digests.pop()
            for known, tenant in self._tenants.items():
                if hmac.compare_digest(known, presented):
                    return tenant
        raise RequestError(Reason.INVALID_KEY, _REFUSAL)


def _keys(metadata: Iterable[tuple[str, str | bytes]]) -> Iterable[bytes]:
    for name, value in metadata:
        raw = value if isinstance(value, bytes) else value.encode("utf-8", "surrogatepass")
        if name == "x-api-key":
            yield raw
        elif name == "authorization":
            scheme, _, key = raw.partition(b" ")
            # Another scheme is a credential that no key equals, not an absent one.
            yield key if scheme.lower() == b"bearer" else b"\0" + raw


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).hexdigest().encode()
