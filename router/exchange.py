"""Requests of other routers, looked up and cancelled; and what others want of this one's."""

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from noria.reasons import RequestError
from router import wire_record
from router.ended import REMEMBERED_S
from router.kept_records import RecordKeeper, StoredRecord
from router.live import LiveRequests
from router.loops import Loop
from router.peers import Answer, Lookups, Question, Wish
from router.record import RequestRecord
from router.store.base import LeaseStore
from router.store.opened import Shared

_FLUSH_S = 1.0


class Elsewhere(Protocol):
    """Requests that are not this router's. Both raise RequestError, REQUEST_NOT_FOUND too."""

    async def record(self, tenant: str, request_id: str) -> bytes: ...

    async def cancel(self, tenant: str, request_id: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Exchange:
    """`elsewhere` is None where the router is alone; `keep` is told of each ended request."""

    elsewhere: Elsewhere | None = None
    keeper: RecordKeeper | None = None
    loops: tuple[Loop, ...] = ()

    def keep(self, record: RequestRecord) -> None:
        """Leave a record for others, and again once its worker has told of the rest."""
        if self.keeper is None or not record.tenant:
            return
        keeper = self.keeper
        keeper.keep(_stored(record))

        def keep_late() -> None:
            if record.late_tokens:
                keeper.keep(_stored(record))

        record.account.when_settled(keep_late)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """What is kept inside the block is left before it ends, if it takes a second at most."""
        yield
        if self.keeper is not None:
            await self.keeper.flush(_FLUSH_S)


def exchange(
    router_id: str, shared: Shared | None, leases: LeaseStore, live: LiveRequests
) -> Exchange:
    """The exchange of one router; make it before the news begin to run."""
    if shared is None:
        return Exchange()
    from router.store.redis_peers import RedisPeers
    from router.store.redis_records import RedisRecords

    records = RedisRecords(shared.connection, REMEMBERED_S)
    peers = RedisPeers(shared.connection, shared.news, router_id, answers(live))
    keeper = RecordKeeper(records)
    lookups = Lookups(router_id, peers, leases, records)
    return Exchange(lookups, keeper, (peers.run, keeper.run))


def answers(live: LiveRequests) -> Callable[[Question], Answer]:
    """What is said to other routers of this one's requests."""

    def answer(question: Question) -> Answer:
        try:
            record = live.record(question.request_id, question.tenant)
            if question.wish is Wish.CANCEL:
                live.cancel(question.request_id, question.tenant)
                return Answer(True)
        except RequestError:
            return Answer(False)
        return Answer(True, wire_record.request(record).SerializeToString())

    return answer


def _stored(record: RequestRecord) -> StoredRecord:
    content = wire_record.request(record).SerializeToString()
    return StoredRecord(record.tenant, record.request_id, content)
