"""The frame around every call: its id, who asks, until when, and the one line that tells it."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from noria.reasons import Reason, RequestError
from noria.service import errors
from noria.service.log import places_of
from noria.service.tls import certified_names
from noria.service.trace import TraceContext, trace_of
from router import wire_record
from router.auth import ApiKey, Metadata, Tenant, carries_key
from router.chat import Call
from router.delivery import Delivery
from router.interrupt import Interrupt
from router.key_cache import KeyCache
from router.live import LiveRequest, LiveRequests
from router.record import RequestRecord

Context = grpc.aio.ServicerContext[Any, Any]
Work = Callable[[Call], Awaitable[None]]


@dataclass(slots=True)
class Admission:
    """Whether new requests are taken; false while draining."""

    is_open: bool = True

    def check(self) -> None:
        if not self.is_open:
            raise RequestError(Reason.DRAINING, "the router is stopping", retry_after_s=1.0)


class Calls:
    """Runs calls. `new_request_id` makes an id no two requests share.

    `begin_trace` says which trace a request belongs to.
    `on_end` hears of each record when it is over, `on_late` of tokens that a worker computed
    for it all the same, `on_refused` of each lookup (GetRequest,
    CancelRequest, ListModels: they have no record) whose key may not call: method and reason.
    `clock` is the router's, in seconds; `wall_clock` gives seconds since the epoch.
    """

    def __init__(
        self,
        keys: KeyCache,
        admission: Admission,
        live: LiveRequests,
        *,
        new_request_id: Callable[[], str],
        default_deadline_s: float,
        on_end: Callable[[RequestRecord], None],
        on_late: Callable[[RequestRecord, int], None],
        on_refused: Callable[[str, Reason], None],
        begin_trace: Callable[[Metadata], TraceContext] = trace_of,
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.live = live
        self._keys = keys
        self._admission = admission
        self._new_request_id = new_request_id
        self._default_deadline_s = default_deadline_s
        self._on_end = on_end
        self._on_late = on_late
        self._on_refused = on_refused
        self._begin_trace = begin_trace
        self._clock = clock
        self._log = log
        self._wall_clock = wall_clock

    async def authenticate(self, method: str, context: Context) -> Tenant:
        """Who makes a lookup. Raises INVALID_KEY, METHOD_FORBIDDEN, STORE_UNAVAILABLE: a log line
        and a counter.
        """
        key = await self._looking_up(method, context, lambda key: key.tenant.check_method(method))
        return key.tenant

    async def authenticate_admin(self, method: str, context: Context) -> ApiKey:
        """Whose key administers; the same errors."""
        return await self._looking_up(method, context, lambda key: key.tenant.check_admin(method))

    async def _looking_up(
        self, method: str, context: Context, check: Callable[[ApiKey], None]
    ) -> ApiKey:
        try:
            key = await self._key(context)
            check(key)
        except RequestError as error:
            trace_id = trace_of(_metadata(context)).trace_id
            self._log.info("lookup_refused", method=method, outcome=error.reason, trace_id=trace_id)
            self._on_refused(method, error.reason)
            raise
        return key

    async def serve(self, method: str, context: Context, work: Work) -> None:
        """Run one request from its id to its log line; an error becomes its status.

        Its timeline travels as trailing metadata, whatever becomes of it, once its key is
        known.
        """
        trace = self._begin_trace(_metadata(context))
        record = self._new_record(method, trace)
        failure: RequestError | None = None
        try:
            await context.send_initial_metadata((("noria-request-id", record.request_id),))
            await self._run(context, record, trace, work)
            record.close()
        except RequestError as error:
            failure = error
            record.close(error.reason)
        except asyncio.CancelledError:
            record.close(Reason.CANCELLED)
            raise
        except Exception as error:
            self._log_defect(record, error)
            failure = RequestError(Reason.INTERNAL, "internal error")
            record.close(Reason.INTERNAL)
        finally:
            self._log.info("request", **record.fields())
            self._on_end(record)
            record.account.end()
        trailing = wire_record.trailing_timeline(record) if record.tenant else ()
        if failure is not None:
            await errors.abort(context, failure, record.request_id, trailing)
        context.set_trailing_metadata(trailing)

    async def _key(self, context: Context) -> ApiKey:
        metadata = _metadata(context)
        certified = () if carries_key(metadata) else certified_names(context)
        return await self._keys.authenticate(metadata, certified)

    def _new_record(self, method: str, trace: TraceContext) -> RequestRecord:
        return RequestRecord(
            self._new_request_id(),
            self._clock,
            accepted_unix_us=int(self._wall_clock() * 1e6),
            on_late=self._on_late,
            method=method,
            trace=trace,
        )

    async def _run(
        self, context: Context, record: RequestRecord, trace: TraceContext, work: Work
    ) -> None:
        key = await self._key(context)
        # From here to `hold` nothing waits: a key that is revoked then finds the request.
        tenant = key.tenant
        record.tenant, record.key_id = tenant.name, key.key_id
        tenant.check_method(record.method)
        left_s = context.time_remaining()
        left_s = self._default_deadline_s if left_s is None else left_s
        deadline = self._clock() + left_s
        interrupt, delivery = Interrupt(), Delivery(self._clock)
        call = Call(tenant, deadline, trace.traceparent, record, delivery, interrupt)
        live = LiveRequest(tenant, interrupt, delivery, record, key.key_id)
        try:
            with interrupt, self.live.hold(live):
                self._admission.check()
                await _until_deadline(call, left_s, work)
        except asyncio.CancelledError:
            # A passed deadline may reach us as the transport's cancellation, too.
            if self._clock() >= deadline:
                record.close(Reason.DEADLINE_EXCEEDED)
            raise

    def _log_defect(self, record: RequestRecord, error: Exception) -> None:
        """Where it happened, without the exception's message, which may quote a prompt."""
        self._log.error(
            "defect",
            request_id=record.request_id,
            trace_id=record.trace.trace_id,
            error=type(error).__name__,
            where=places_of(error),
        )


async def _until_deadline(call: Call, left_s: float, work: Work) -> None:
    """Do the work, or end it with DEADLINE_EXCEEDED in `left_s` seconds."""
    expired = RequestError(Reason.DEADLINE_EXCEEDED, "the deadline passed")
    if left_s <= 0:
        raise expired
    timer = asyncio.get_running_loop().call_later(left_s, call.interrupt.set, expired)
    try:
        await work(call)
    finally:
        timer.cancel()


def _metadata(context: Context) -> Metadata:
    return context.invocation_metadata() or ()
