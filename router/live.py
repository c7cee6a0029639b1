"""The requests being answered now, by id, and the records of the last ones that ended.

For CancelRequest and GetRequest, for slow readers, and for the drain.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from noria.reasons import Reason, RequestError
from router.auth import Tenant
from router.delivery import Delivery
from router.ended import EndedRecords
from router.interrupt import Interrupt
from router.record import RequestRecord


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request on its way, by the key of this id; `interrupt` ends it."""

    tenant: Tenant
    interrupt: Interrupt
    delivery: Delivery
    record: RequestRecord
    key_id: str = ""


class LiveRequests:
    """All of them, and those that ended lately. Another tenant's id answers like one that
    never was.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._ended = EndedRecords(clock)
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[LiveRequest]:
        """Those being answered now, oldest first."""
        return iter(list(self._live.values()))

    @contextlib.contextmanager
    def hold(self, request: LiveRequest) -> Iterator[None]:
        """The request is live as long as the block."""
        request_id = request.record.request_id
        self._live[request_id] = request
        self._idle.clear()
        try:
            yield
        finally:
            del self._live[request_id]
            self._ended.add(request.tenant.name, request.record)
            if not self._live:
                self._idle.set()

    def record(self, request_id: str, tenant: str) -> RequestRecord:
        """A tenant's request, running or ended. Raises REQUEST_NOT_FOUND."""
        request = self._live.get(request_id)
        if request is not None and request.tenant.name == tenant:
            return request.record
        ended = self._ended.find(tenant, request_id)
        if ended is not None:
            return ended
        raise RequestError(Reason.REQUEST_NOT_FOUND, "request_id: no such request")

    def cancel(self, request_id: str, tenant: str) -> None:
        """End a tenant's request with CANCELLED; nothing happens if it has ended.

        Raises REQUEST_NOT_FOUND.
        """
        self.record(request_id, tenant)
        request = self._live.get(request_id)
        if request is not None:
            request.interrupt.set(RequestError(Reason.CANCELLED, "cancelled by CancelRequest"))

    def end_slow_readers(self) -> None:
        """Interrupt those whose clients leave their streams unread."""
        for request in list(self._live.values()):
            error = request.delivery.overdue()
            if error is not None:
                request.interrupt.set(error)

    def interrupt_all(self, error: RequestError, models: frozenset[str] | None = None) -> None:
        """End every request, or those of these models alone."""
        for request in list(self._live.values()):
            if models is None or request.record.model in models:
                request.interrupt.set(error)

    def interrupt_keys(self, key_ids: frozenset[str], error: RequestError) -> int:
        """End every request of these keys; how many there were."""
        ended = [request for request in self._live.values() if request.key_id in key_ids]
        for request in ended:
            request.interrupt.set(error)
        return len(ended)

    async def wait_idle(self) -> None:
        """Return once nothing is live."""
        await self._idle.wait()
