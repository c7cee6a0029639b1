"""Leaves records of ended requests where other routers find them, beside the requests' way."""

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from router.store.base import StoreUnavailableError

MAX_WAITING = 10_000
BATCH = 50
_PAUSE_S = 0.5


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One tenant's request as its owner may be told of it; no text, no ids of tokens."""

    tenant: str
    request_id: str
    content: bytes


class RecordStore(Protocol):
    """Where they are left."""

    async def put(self, records: Sequence[StoredRecord]) -> None:
        """Raises StoreUnavailableError; they may be put again."""


class RecordKeeper:
    """The last 10,000 that are not yet left; the oldest go first: they are a convenience."""

    def __init__(self, store: RecordStore, max_waiting: int = MAX_WAITING) -> None:
        self._store = store
        self._max_waiting = max_waiting
        self._waiting: dict[str, StoredRecord] = {}
        self._news = asyncio.Event()

    def keep(self, record: StoredRecord) -> None:
        """Leave it, in place of what was told of the same request before."""
        self._waiting.pop(record.request_id, None)
        self._waiting[record.request_id] = record
        if len(self._waiting) > self._max_waiting:
            del self._waiting[next(iter(self._waiting))]
        self._news.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._news.wait()
            if not await self.put_batch():
                await asyncio.sleep(_PAUSE_S)

    async def flush(self, timeout_s: float) -> None:
        """Leave what waits, for so long at most."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._waiting and await self.put_batch():
                    pass

    async def put_batch(self) -> bool:
        """Leave the oldest; whether the store took them."""
        self._news.clear()
        batch = list(self._waiting.values())[:BATCH]
        try:
            if batch:
                await self._store.put(batch)
        except StoreUnavailableError:
            self._news.set()
            return False
        for record in batch:
            if self._waiting.get(record.request_id) is record:
                del self._waiting[record.request_id]
        if self._waiting:
            self._news.set()
        return True
