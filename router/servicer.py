"""ChatService on the wire: translates calls, answers and errors."""

from collections.abc import Callable
from typing import TypeVar

from noria.reasons import RequestError, invalid_field
from noria.service import errors
from noria.service.limits import MAX_REQUEST_ID_BYTES
from noria.v1 import chat_pb2, chat_pb2_grpc
from router import wire, wire_record
from router.auth import Tenant
from router.calls import Calls, Context
from router.chat import Call, Chats
from router.estimate import Estimate, estimate
from router.events import Event, MessageEnd, MessageStart, TextDelta
from router.record import RequestRecord
from router.validation import checked_chat

T = TypeVar("T")


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    """Answers clients. Methods that this version does not have answer UNIMPLEMENTED."""

    def __init__(self, chats: Chats, calls: Calls) -> None:
        self._chats = chats
        self._calls = calls

    # Coroutines that write, not generators that yield: when a call is cancelled, what a
    # suspended generator holds would come back whenever it is collected.
    async def StreamChat(  # type: ignore[override]  # noqa: N802 - the wire's name
        self, request: chat_pb2.StreamChatRequest, context: Context
    ) -> None:
        async def stream(call: Call) -> None:
            async def write(event: Event) -> None:
                told = told_event(event, call.record)
                await context.write(chat_pb2.StreamChatResponse(event=told))

            chat = checked_chat(request.spec, call.tenant.priority_ceiling)
            async with self._chats.answering(call, chat) as delivery:
                await delivery.pump(write)

        await self._calls.serve("StreamChat", context, stream)

    async def Chat(  # noqa: N802 - the wire's name
        self, request: chat_pb2.ChatRequest, context: Context
    ) -> chat_pb2.ChatResponse:
        collected = _Collected()

        async def collect(call: Call) -> None:
            chat = checked_chat(request.spec, call.tenant.priority_ceiling)
            async with self._chats.answering(call, chat) as delivery:
                await delivery.pump(lambda event: collected.add(event, call.record))

        await self._calls.serve("Chat", context, collect)
        return collected.response()

    async def CountTokens(  # noqa: N802 - the wire's name
        self, request: chat_pb2.CountTokensRequest, context: Context
    ) -> chat_pb2.CountTokensResponse:
        response = chat_pb2.CountTokensResponse()

        async def count(call: Call) -> None:
            chat = checked_chat(request.spec, call.tenant.priority_ceiling)
            response.input_tokens = await self._chats.count(call, chat)

        await self._calls.serve("CountTokens", context, count)
        return response

    async def EstimateChat(  # noqa: N802 - the wire's name
        self, request: chat_pb2.EstimateChatRequest, context: Context
    ) -> chat_pb2.EstimateChatResponse:
        result = Estimate()

        async def look_ahead(call: Call) -> None:
            try:
                chat = checked_chat(request.spec, call.tenant.priority_ceiling)
                await estimate(self._chats, call, chat, result)
            except RequestError as refusal:
                result.refusal = refusal

        await self._calls.serve("EstimateChat", context, look_ahead)
        return wire_record.estimate(result)

    async def GetRequest(  # noqa: N802 - the wire's name
        self, request: chat_pb2.GetRequestRequest, context: Context
    ) -> chat_pb2.GetRequestResponse:
        def find(tenant: Tenant) -> chat_pb2.GetRequestResponse:
            request_id = _checked_id(request.request_id)
            return wire_record.request(self._calls.live.record(request_id, tenant))

        return await self._answer("GetRequest", context, find)

    async def CancelRequest(  # noqa: N802 - the wire's name
        self, request: chat_pb2.CancelRequestRequest, context: Context
    ) -> chat_pb2.CancelRequestResponse:
        def cancel(tenant: Tenant) -> chat_pb2.CancelRequestResponse:
            self._calls.live.cancel(_checked_id(request.request_id), tenant)
            return chat_pb2.CancelRequestResponse()

        return await self._answer("CancelRequest", context, cancel)

    async def ListModels(  # noqa: N802 - the wire's name
        self, request: chat_pb2.ListModelsRequest, context: Context
    ) -> chat_pb2.ListModelsResponse:
        def list_models(tenant: Tenant) -> chat_pb2.ListModelsResponse:
            served = self._chats.registry.models(tenant.models)
            return chat_pb2.ListModelsResponse(models=map(wire_record.model, served))

        return await self._answer("ListModels", context, list_models)

    async def _answer(self, method: str, context: Context, answer: Callable[[Tenant], T]) -> T:
        """What is answered at once, from what is known; an error becomes its status."""
        try:
            return answer(self._calls.authenticate(method, context))
        except RequestError as error:
            await errors.abort(context, error)


def told_event(event: Event, record: RequestRecord) -> chat_pb2.StreamEvent:
    """An event as it is handed to the client; the last but one ends and carries the timeline."""
    told = wire.stream_event(event)
    if isinstance(event, TextDelta) and event.text:
        record.first_delta()
    elif isinstance(event, MessageEnd):
        record.close()
        told.message_delta.timeline.CopyFrom(wire_record.timeline(record))
    return told


def _checked_id(request_id: str) -> str:
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise invalid_field("request_id", f"{size} bytes; at most {MAX_REQUEST_ID_BYTES}")
    return request_id


class _Collected:
    """Gathers an answer's events into one response."""

    def __init__(self) -> None:
        self._start: MessageStart | None = None
        self._texts: list[str] = []
        self._steps: list[object] = []
        self._end: MessageEnd | None = None
        self._told = chat_pb2.StreamEvent()

    async def add(self, event: Event, record: RequestRecord) -> None:
        told = told_event(event, record)
        match event:
            case MessageStart():
                self._start = event
            case TextDelta():
                self._texts.append(event.text)
                self._steps += event.steps
            case MessageEnd():
                self._end, self._told = event, told
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
            timeline=self._told.message_delta.timeline,
        )
