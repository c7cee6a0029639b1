"""ChatService on the wire: translates calls, answers and errors."""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from google.protobuf.message import Message

from noria.reasons import Reason, RequestError, invalid_field
from noria.service import errors
from noria.service.limits import MAX_REQUEST_ID_BYTES
from noria.v1 import chat_pb2, chat_pb2_grpc
from router import wire_events, wire_record, wire_usage
from router.auth import Tenant
from router.calls import Calls, Context
from router.chat import Call, Chats
from router.collected import CollectedAnswer
from router.estimate import Estimate, estimate
from router.events import Event, MessageEnd, TextDelta
from router.exchange import Elsewhere
from router.record import RequestRecord
from router.requests import GenerationInput
from router.usage import UsageReports
from router.validation import checked_chat, checked_completion

T = TypeVar("T")
Check = Callable[[Tenant], GenerationInput]


class ChatServicer(chat_pb2_grpc.ChatServiceServicer):
    """Answers clients."""

    def __init__(
        self, chats: Chats, calls: Calls, elsewhere: Elsewhere | None, usage: UsageReports
    ) -> None:
        self._chats = chats
        self._calls = calls
        self._elsewhere = elsewhere
        self._usage = usage

    async def StreamChat(  # type: ignore[override]  # noqa: N802 - the wire's name
        self, request: chat_pb2.StreamChatRequest, context: Context
    ) -> None:
        await self._stream(
            "StreamChat",
            context,
            lambda tenant: checked_chat(request.spec, tenant.priority_ceiling),
            lambda event: chat_pb2.StreamChatResponse(event=event),
        )

    async def Chat(  # noqa: N802 - the wire's name
        self, request: chat_pb2.ChatRequest, context: Context
    ) -> chat_pb2.ChatResponse:
        response = chat_pb2.ChatResponse()
        await self._collect(
            "Chat",
            context,
            lambda tenant: checked_chat(request.spec, tenant.priority_ceiling),
            response,
        )
        return response

    async def StreamCompletion(  # type: ignore[override]  # noqa: N802 - the wire's name
        self, request: chat_pb2.StreamCompletionRequest, context: Context
    ) -> None:
        await self._stream(
            "StreamCompletion",
            context,
            lambda tenant: checked_completion(request.spec, tenant.priority_ceiling),
            lambda event: chat_pb2.StreamCompletionResponse(event=event),
        )

    async def Completion(  # noqa: N802 - the wire's name
        self, request: chat_pb2.CompletionRequest, context: Context
    ) -> chat_pb2.CompletionResponse:
        response = chat_pb2.CompletionResponse()
        await self._collect(
            "Completion",
            context,
            lambda tenant: checked_completion(request.spec, tenant.priority_ceiling),
            response,
        )
        return response

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
        async def find(tenant: Tenant) -> chat_pb2.GetRequestResponse:
            request_id = _checked_id(request.request_id)
            try:
                return wire_record.request(self._calls.live.record(request_id, tenant.name))
            except RequestError as error:
                if self._elsewhere is None or error.reason is not Reason.REQUEST_NOT_FOUND:
                    raise
            told = await self._elsewhere.record(tenant.name, request_id)
            return chat_pb2.GetRequestResponse.FromString(told)

        return await self._answer("GetRequest", context, find)

    async def CancelRequest(  # noqa: N802 - the wire's name
        self, request: chat_pb2.CancelRequestRequest, context: Context
    ) -> chat_pb2.CancelRequestResponse:
        async def cancel(tenant: Tenant) -> chat_pb2.CancelRequestResponse:
            request_id = _checked_id(request.request_id)
            try:
                self._calls.live.cancel(request_id, tenant.name)
            except RequestError as error:
                if self._elsewhere is None or error.reason is not Reason.REQUEST_NOT_FOUND:
                    raise
                await self._elsewhere.cancel(tenant.name, request_id)
            return chat_pb2.CancelRequestResponse()

        return await self._answer("CancelRequest", context, cancel)

    async def ListModels(  # noqa: N802 - the wire's name
        self, request: chat_pb2.ListModelsRequest, context: Context
    ) -> chat_pb2.ListModelsResponse:
        async def list_models(tenant: Tenant) -> chat_pb2.ListModelsResponse:
            served = self._chats.registry.models(tenant.models)
            return chat_pb2.ListModelsResponse(models=map(wire_record.model, served))

        return await self._answer("ListModels", context, list_models)

    async def GetUsage(  # noqa: N802 - the wire's name
        self, request: chat_pb2.GetUsageRequest, context: Context
    ) -> chat_pb2.GetUsageResponse:
        async def add_up(tenant: Tenant) -> chat_pb2.GetUsageResponse:
            question = wire_usage.question(request)
            return wire_usage.report(await self._usage.report(tenant, question))

        return await self._answer("GetUsage", context, add_up)

    # Coroutines that write, not generators that yield: when a call is cancelled, what a
    # suspended generator holds would come back whenever it is collected.
    async def _stream(
        self,
        method: str,
        context: Context,
        check: Check,
        respond: Callable[[chat_pb2.StreamEvent], Message],
    ) -> None:
        async def stream(call: Call) -> None:
            async def write(event: Event) -> None:
                await context.write(respond(told_event(event, call.record)))

            async with self._chats.answering(call, check(call.tenant)) as delivery:
                await delivery.pump(write)

        await self._calls.serve(method, context, stream)

    async def _collect(
        self,
        method: str,
        context: Context,
        check: Check,
        response: chat_pb2.ChatResponse | chat_pb2.CompletionResponse,
    ) -> None:
        async def collect(call: Call) -> None:
            collected = CollectedAnswer()

            async def add(event: Event) -> None:
                collected.add(event, told_event(event, call.record))

            async with self._chats.answering(call, check(call.tenant)) as delivery:
                await delivery.pump(add)
            collected.fill(response)

        await self._calls.serve(method, context, collect)

    async def _answer(
        self, method: str, context: Context, answer: Callable[[Tenant], Awaitable[T]]
    ) -> T:
        """What is answered from what is known; an error becomes its status."""
        try:
            return await answer(await self._calls.authenticate(method, context))
        except RequestError as error:
            await errors.abort(context, error)


def told_event(event: Event, record: RequestRecord) -> chat_pb2.StreamEvent:
    """An event as it is handed to the client; the last choice's end carries the timeline."""
    told = wire_events.stream_event(event)
    if isinstance(event, TextDelta) and event.text:
        record.first_delta()
    elif isinstance(event, MessageEnd) and event.is_last:
        record.close()
        told.message_delta.timeline.CopyFrom(wire_record.timeline(record))
    return told


def _checked_id(request_id: str) -> str:
    size = len(request_id.encode())
    if size > MAX_REQUEST_ID_BYTES:
        raise invalid_field("request_id", f"{size} bytes; at most {MAX_REQUEST_ID_BYTES}")
    return request_id
