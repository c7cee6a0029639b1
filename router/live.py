"""The requests being answered now, by id: for CancelRequest, slow readers and the drain."""

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

from noria.reasons import Reason, RequestError
from router.auth import Tenant
from router.delivery import Delivery
from router.interrupt import Interrupt

_REMEMBERED = 10_000


@dataclass(frozen=True, slots=True)
class LiveRequest:
    """One request on its way; `interrupt` ends it."""

    tenant: Tenant
    interrupt: Interrupt
    delivery: Delivery


class LiveRequests:
    """All of them, and the ids of the last finished ones, so that a late cancel is no error."""

    def __init__(self) -> None:
        self._live: dict[str, LiveRequest] = {}
        self._finished: OrderedDict[str, str] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._live)

    @contextlib.contextmanager
    def hold(self, request_id: str, request: LiveRequest) -> Iterator[None]:
        """The request is live as long as the block."""
        self._live[request_id] = request
        self._idle.clear()
        try:
            yield
        finally:
            del self._live[request_id]
            self._remember(request_id, request.tenant)
            if not self._live:
                self._idle.set()

    def cancel(self, request_id: str, tenant: Tenant) -> None:
        """End a tenant's request with CANCELLED; nothing happens if it has ended.

        Raises REQUEST_NOT_FOUND, alike for an unknown id and for another tenant's.
        """
        request = self._live.get(request_id)
        owner = request.tenant.name if request else self._finished.get(request_id)
        if owner != tenant.name:
            raise RequestError(Reason.REQUEST_NOT_FOUND, "request_id: no such request")
        if request is not None:
            request.interrupt.set(RequestError(Reason.CANCELLED, "cancelled by CancelRequest"))

    def end_slow_readers(self) -> None:
        """Interrupt those whose clients leave their streams unread."""
        for request in list(self._live.values()):
            error = request.delivery.overdue()
            if error is not None:
                request.interrupt.set(error)

    def interrupt_all(self, error: RequestError) -> None:
        for request in list(self._live.values()):
            request.interrupt.set(error)

    async def wait_idle(self) -> None:
        """Return once nothing is live."""
        await self._idle.wait()

    def _remember(self, request_id: str, tenant: Tenant) -> None:
        self._finished[request_id] = tenant.name
        while len(self._finished) > _REMEMBERED:
            self._finished.popitem(last=False)
