"""Asks a Noria router over its own chat API."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from bench.load.outcome import BROKEN, CANCELLED, SERVED, Outcome
from bench.load.workload import Request
from noria.client.connection import channel_options, key_metadata
from noria.client.decode import error_of_rpc
from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2

Metadata = tuple[tuple[str, str], ...]


class GrpcTarget:
    """`temperature` 0 is greedy. Every answer is asked to go on to its last token."""

    def __init__(
        self,
        stub: Any,
        metadata: Sequence[Any],
        *,
        model: str,
        temperature: float,
        clock: Callable[[], float],
    ) -> None:
        self._stub = stub
        self._metadata = metadata
        self._model = model
        self._temperature = temperature
        self._clock = clock

    async def ask(self, request: Request, outcome: Outcome) -> None:
        wire = chat_pb2.StreamChatRequest(spec=self._spec(request))
        metadata = self._metadata[request.tenant % len(self._metadata)]
        outcome.sent_at = self._clock()
        call = self._stub.StreamChat(wire, timeout=request.deadline_s, metadata=metadata)
        try:
            await self._read(call, request, outcome)
        except grpc.aio.AioRpcError as error:
            failure = error_of_rpc(error)
            outcome.ended = failure.reason.value if failure.reason else error.code().name
        finally:
            call.cancel()
            outcome.ended_at = self._clock()

    async def _read(self, call: Any, request: Request, outcome: Outcome) -> None:
        while (response := await call.read()) is not grpc.aio.EOF:
            event = response.event
            kind = event.WhichOneof("event")
            if kind == "content_block_delta" and event.content_block_delta.text:
                outcome.message_times.append(self._clock())
                if len(outcome.message_times) == request.cancel_after:
                    outcome.ended = CANCELLED
                    return
                if request.pause_s:
                    await asyncio.sleep(request.pause_s)
            elif kind == "message_delta":
                self._take_end(event.message_delta, request, outcome)
            elif kind == "message_stop":
                outcome.ended = SERVED
        outcome.ended = outcome.ended or BROKEN

    def _take_end(self, end: chat_pb2.MessageDelta, request: Request, outcome: Outcome) -> None:
        outcome.input_tokens = end.usage.input_tokens
        outcome.cached_tokens = end.usage.cached_tokens
        outcome.output_tokens = end.usage.output_tokens
        at_limit = end.stop_reason == chat_pb2.STOP_REASON_MAX_TOKENS
        outcome.check(request.output_tokens, stopped_at_limit=at_limit)

    def _spec(self, request: Request) -> chat_pb2.ChatSpec:
        block = chat_pb2.ContentBlock(text=chat_pb2.TextBlock(text=request.prompt))
        return chat_pb2.ChatSpec(
            model=self._model,
            system=request.system or None,
            messages=[chat_pb2.Message(role=chat_pb2.ROLE_USER, content=[block])],
            max_tokens=request.output_tokens,
            sampling=common_pb2.SamplingParams(temperature=self._temperature, ignore_eos=True),
            priority=request.priority,
        )


@asynccontextmanager
async def grpc_target(
    address: str,
    api_keys: Sequence[str],
    *,
    model: str,
    temperature: float,
    clock: Callable[[], float],
) -> AsyncIterator[GrpcTarget]:
    """One connection to `address` (host:port or another gRPC name); a key for each tenant."""
    async with grpc.aio.insecure_channel(address, options=channel_options(address)) as channel:
        yield GrpcTarget(
            chat_pb2_grpc.ChatServiceStub(channel),
            [key_metadata(key) for key in api_keys],
            model=model,
            temperature=temperature,
            clock=clock,
        )
