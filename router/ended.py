"""The records of requests that have ended, for as long as somebody may ask for them."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from router.record import RequestRecord

REMEMBERED = 10_000
REMEMBERED_S = 3600.0


@dataclass(frozen=True, slots=True)
class _Ended:
    at: float
    record: RequestRecord


class EndedRecords:
    """The last 10,000 of all tenants, each for an hour.

    Where these are too many, the tenant that has most of them loses its oldest: however much
    one tenant asks, it pushes out only its own while others hold fewer.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._of_tenant: dict[str, OrderedDict[str, _Ended]] = {}
        self._count = 0

    def add(self, tenant: str, record: RequestRecord) -> None:
        """Remember a record that is over."""
        own = self._of_tenant.setdefault(tenant, OrderedDict())
        own[record.request_id] = _Ended(self._clock(), record)
        self._count += 1
        self._forget_old(tenant)
        if self._count > REMEMBERED:
            self._forget_first(max(self._of_tenant, key=lambda name: len(self._of_tenant[name])))

    def find(self, tenant: str, request_id: str) -> RequestRecord | None:
        """A tenant's own record, if it is still remembered."""
        self._forget_old(tenant)
        own = self._of_tenant.get(tenant)
        ended = own.get(request_id) if own else None
        return None if ended is None else ended.record

    def _forget_old(self, tenant: str) -> None:
        oldest = self._clock() - REMEMBERED_S
        while (own := self._of_tenant.get(tenant)) and next(iter(own.values())).at < oldest:
            self._forget_first(tenant)

    def _forget_first(self, tenant: str) -> None:
        own = self._of_tenant[tenant]
        own.popitem(last=False)
        self._count -= 1
        if not own:
            del self._of_tenant[tenant]
