"""What routers tell each other of their tenants' limits."""

from collections.abc import Sequence
from typing import Protocol

from router.limit_decision import Statement, Verdict


class LimitStore(Protocol):
    """The accounts of all routers, and the buckets that they share.

    A router has one exchange under way at a time, so that what it tells arrives in order.
    """

    @property
    def available(self) -> bool:
        """Whether it can be asked now."""
        ...

    async def wait_available(self) -> None:
        """Return once it can be asked."""

    async def exchange(
        self, router: str, statements: Sequence[Statement], lease_s: float
    ) -> list[list[Verdict]]:
        """Take over each statement and answer its asks, in order.

        Each statement is a whole; together they are not. Raises StoreUnavailableError: some
        of them may have been taken over.
        """
        ...
