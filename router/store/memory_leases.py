"""Leases within one process."""

import time
from collections.abc import Callable


class MemoryLeases:
    """A `LeaseStore` of this router alone."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: dict[tuple[str, str], float] = {}

    async def renew(self, kind: str, holder: str, ttl_s: float) -> None:
        now = self._clock()
        self._ends = {held: end for held, end in self._ends.items() if end > now}
        self._ends[kind, holder] = now + ttl_s

    async def release(self, kind: str, holder: str) -> None:
        self._ends.pop((kind, holder), None)

    async def live(self, kind: str) -> frozenset[str]:
        now = self._clock()
        return frozenset(
            holder for (of, holder), end in self._ends.items() if of == kind and end > now
        )
