"""What a router asks of the state that replicas share, and how it hears that it is away.

No prompt, reply, token id or key goes into it, neither in names nor in values.
"""

from typing import Protocol

# Every name in Redis begins so. What one script touches shares a {tag}, and so a slot.
PREFIX = "noria:"
# What a call may add to a request that waits for it.
CALL_TIMEOUT_S = 0.1


class StoreUnavailableError(Exception):
    """The store did not do what it was asked, and may or may not have begun it.

    Its message holds no address, name or value. Whoever asks on a request's path decides
    what the request gets without the store.
    """


class StoreURLError(ValueError):
    """A URL that cannot be used, or not here; it is not repeated, since it may hold a password."""


class LeaseStore(Protocol):
    """Who is alive, by kind ("workers", "routers"): a holder is, until its lease runs out."""

    async def renew(self, kind: str, holder: str, ttl_s: float) -> None:
        """Hold the lease for `ttl_s` from now on. Raises StoreUnavailableError."""

    async def release(self, kind: str, holder: str) -> None:
        """Give it up; nothing happens if it is not held. Raises StoreUnavailableError."""

    async def live(self, kind: str) -> frozenset[str]:
        """Whose leases have not run out. Raises StoreUnavailableError."""
        ...
