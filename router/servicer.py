"""ChatService on the wire: translates calls, answers and errors, and tells each in one line."""

import asyncio
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from noria.reasons import Reason, RequestError, invalid_field
from noria.service import errors
from noria.service.limits import MAX_REQUEST_ID_BYTES
from noria.v1 import chat_pb2, chat_pb2_grpc
from router import wire
from router.auth import KeyRing, Tenant
from router.chat import Call, Chats
from router.events import Event, MessageEnd, MessageStart, TextDelta
from router.interrupt import Interrupt
from router.record import RequestRecord
from router.validation import checked_chat

Context = grpc.aio.ServicerContext[Any, Any]
Work = Callable[[Call], Awaitable[None]]


@dataclass(slots=True)
class Admission:
    """Whether new requests are taken; false while draining."""

    is_open: bool = True

    def check(self) -> None:
        if not self.is_open:
            raise RequestError(Reason.DRAINING, "the router is stopping", retry_after_s=1.0)


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    """Answers clients. `new_request_id` makes an id no two requests share.

    Methods that this version does not have answer UNIMPLEMENTED.
    """

    def __init__(
        self,
        chats: Chats,
        keys: KeyRing,
        admission: Admission,
        *,
        new_request_id: Callable[[], str],
        default_deadline_s: float,
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._chats = chats
        self._keys = keys
        self._admission = admission
        self._new_request_id = new_request_id
        self._default_deadline_s = default_deadline_s
        self._log = log

    # Coroutines that write, not generators that yield: when a call is cancelled, what a
    # suspended generator holds would come back whenever it is collected.
    async def StreamChat(  # type: ignore[override]  # noqa: N802 - the wire's name
        self, request: chat_pb2.StreamChatRequest, context: Context
    ) -> None:
        async def write(event: Event) -> None:
            await context.write(chat_pb2.StreamChatResponse(event=wire.stream_event(event)))

        async def stream(call: Call) -> None:
            chat = checked_chat(request.spec, call.tenant.priority_ceiling)
            async with self._chats.answering(call, chat) as delivery:
                await delivery.pump(write)

        await self._serve(context, stream)

    async def Chat(  # noqa: N802 - the wire's name
        self, request: chat_pb2.ChatRequest, context: Context
    ) -> chat_pb2.ChatResponse:
        collected = _Collected()

        async def collect(call: Call) -> None:
            chat = checked_chat(request.spec, call.tenant.priority_ceiling)
            async with self._chats.answering(call, chat) as delivery:
                await delivery.pump(collected.add)

        await self._serve(context, collect)
        return collected.response()

    async def CancelRequest(  # noqa: N802 - the wire's name
        self, request: chat_pb2.CancelRequestRequest, context: Context
    ) -> chat_pb2.CancelRequestResponse:
        try:
            tenant = self._authenticate(context)
            size = len(request.request_id.encode())
            if size > MAX_REQUEST_ID_BYTES:
                raise invalid_field("request_id", f"{size} bytes; at most {MAX_REQUEST_ID_BYTES}")
            self._chats.live.cancel(request.request_id, tenant)
        except RequestError as error:
            await errors.abort(context, error)
        return chat_pb2.CancelRequestResponse()

    def _authenticate(self, context: Context) -> Tenant:
        return self._keys.authenticate(context.invocation_metadata() or ())

    async def _serve(self, context: Context, work: Work) -> None:
        """Run one request from its id to its log line; an error becomes its status."""
        record = RequestRecord(self._new_request_id(), self._chats.clock)
        failure: RequestError | None = None
        try:
            await context.send_initial_metadata((("noria-request-id", record.request_id),))
            await self._run(context, record, work)
        except RequestError as error:
            failure = error
            record.reason = error.reason
        except asyncio.CancelledError:
            record.reason = record.reason or Reason.CANCELLED
            raise
        except Exception as error:
            self._log_defect(record, error)
            failure = RequestError(Reason.INTERNAL, "internal error")
            record.reason = Reason.INTERNAL
        finally:
            self._log.info("request", **record.fields())
        if failure is not None:
            await errors.abort(context, failure, record.request_id)

    async def _run(self, context: Context, record: RequestRecord, work: Work) -> None:
        tenant = self._authenticate(context)
        record.tenant = tenant.name
        self._admission.check()
        left_s = context.time_remaining()
        left_s = self._default_deadline_s if left_s is None else left_s
        expired = RequestError(Reason.DEADLINE_EXCEEDED, "the deadline passed")
        if left_s <= 0:
            raise expired
        with Interrupt() as interrupt:
            timer = asyncio.get_running_loop().call_later(left_s, interrupt.set, expired)
            deadline = self._chats.clock() + left_s
            try:
                await work(Call(tenant, deadline, record, interrupt))
            except asyncio.CancelledError:
                # A passed deadline may reach us as the transport's cancellation, too.
                if self._chats.clock() >= deadline:
                    record.reason = Reason.DEADLINE_EXCEEDED
                raise
            finally:
                timer.cancel()

    def _log_defect(self, record: RequestRecord, error: Exception) -> None:
        """Where it happened, without the exception's message, which may quote a prompt."""
        frames = traceback.extract_tb(error.__traceback__)
        self._log.error(
            "defect",
            request_id=record.request_id,
            error=type(error).__name__,
            at=[f"{frame.filename}:{frame.lineno}" for frame in frames],
        )


class _Collected:
    """Gathers an answer's events into one response."""

    def __init__(self) -> None:
        self._start: MessageStart | None = None
        self._texts: list[str] = []
        self._steps: list[object] = []
        self._end: MessageEnd | None = None

    async def add(self, event: Event) -> None:
        match event:
            case MessageStart():
                self._start = event
            case TextDelta():
                self._texts.append(event.text)
                self._steps += event.steps
            case MessageEnd():
                self._end = event
            case _:
                pass

    def response(self) -> chat_pb2.ChatResponse:
        """The whole answer; an answer that ended has both a start and an end."""
        if self._start is None or self._end is None:
            raise RuntimeError("an answer without a start or an end")
        return chat_pb2.ChatResponse(
            request_id=self._start.request_id,
            model=self._start.model,
            choices=[wire.choice("".join(self._texts), self._steps, self._end)],
            usage=wire.wire_usage(self._end.usage),
        )
