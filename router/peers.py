"""What routers ask each other about requests, and who is asked.

A request id names the router that made it: `req-<router>-<random>`.
"""

import asyncio
import re
import secrets
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from noria.reasons import Reason, RequestError
from router.ledger.sweeper import ROUTERS
from router.store.base import LeaseStore, StoreUnavailableError

ANSWER_S = 2.0
_PAUSE_S = 0.1
_ID = re.compile(r"req-([0-9a-f]{8})-[0-9a-f]{32}", re.ASCII)


def new_request_id(router_id: str) -> str:
    """An id that no two requests share."""
    return f"req-{router_id}-{secrets.token_hex(16)}"


def router_of(request_id: str) -> str | None:
    """The router that made an id; None for what no router makes."""
    named = _ID.fullmatch(request_id)
    return named[1] if named else None


class Wish(StrEnum):
    """What is asked for."""

    RECORD = "record"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Question:
    """About one tenant's request."""

    wish: Wish
    tenant: str
    request_id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """Whether the tenant has such a request, and its record if that was asked for."""

    found: bool
    record: bytes = b""


class Peers(Protocol):
    """The way to other routers."""

    async def ask(self, router_id: str, question: Question) -> Answer | None:
        """Its answer; None if it gave none in time. Raises StoreUnavailableError."""
        ...


class Records(Protocol):
    """What routers left behind of requests that have ended."""

    async def get(self, tenant: str, request_id: str) -> bytes | None:
        """Raises StoreUnavailableError."""
        ...


@dataclass(frozen=True, slots=True)
class Lookups:
    """Finds and cancels requests that other routers have.

    Whoever made the id is asked. If it is gone, what it left behind is looked at: of a request
    that had ended that is its record, of others nothing.
    """

    router_id: str
    peers: Peers
    leases: LeaseStore
    records: Records
    answer_s: float = ANSWER_S

    async def record(self, tenant: str, request_id: str) -> bytes:
        """The record. Raises REQUEST_NOT_FOUND; STORE_UNAVAILABLE if it cannot be told now."""
        answer = await self._ask(Question(Wish.RECORD, tenant, request_id))
        if not answer.found:
            raise _not_found()
        return answer.record

    async def cancel(self, tenant: str, request_id: str) -> None:
        """End it; nothing happens if it has ended. Raises as `record` does."""
        answer = await self._ask(Question(Wish.CANCEL, tenant, request_id))
        if not answer.found:
            raise _not_found()

    async def _ask(self, question: Question) -> Answer:
        router_id = router_of(question.request_id)
        if router_id is None or router_id == self.router_id:
            raise _not_found()
        try:
            async with asyncio.timeout(self.answer_s):
                return await self._answered(router_id, question)
        except (StoreUnavailableError, TimeoutError):
            silent = "the router that has this request cannot be asked now"
            raise RequestError(Reason.STORE_UNAVAILABLE, silent) from None

    async def _answered(self, router_id: str, question: Question) -> Answer:
        """By the router itself, or by what it left behind. It may take any time."""
        while True:
            answer = await self.peers.ask(router_id, question)
            if answer is not None:
                return answer
            if router_id not in await self.leases.live(ROUTERS):
                left = await self.records.get(question.tenant, question.request_id)
                return Answer(left is not None, left or b"")
            # It lives, and may just be connecting to the store again.
            await asyncio.sleep(_PAUSE_S)


def _not_found() -> RequestError:
    return RequestError(Reason.REQUEST_NOT_FOUND, "request_id: no such request")
