"""The client for asyncio."""

import asyncio
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from noria.client.connection import (
    channel_options,
    checked_address,
    find_api_key,
    key_metadata,
    warn_if_unencrypted,
)
from noria.client.request import (
    ChatOptions,
    Messages,
    RawPrompt,
    chat_spec,
    checked_timeout,
    completion_spec,
    trace_metadata,
)
from noria.client.result import ChatResult, result_of
from noria.client.retry import Calls, errors_of_call, repeated_async
from noria.client.stream import AsyncChatStream
from noria.client.tls import Tls, opened_tls
from noria.service.tls import aio_channel
from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2


class AsyncClient:
    """Calls a Noria server from one event loop. Use it in an `async with` block.

    `address` is host:port, or a name for several routers, which take the calls in
    turn: dns:///name:port or ipv4:host:port,host:port.
    `api_key`: left out, it is NORIA_API_KEY or, at this computer's own addresses,
    what `noria up` wrote. `timeout` is every call's deadline in seconds unless the
    call names its own. With `retry` a chat that the server refuses before its first
    event, saying after which delay it may pass, is asked again after that delay if
    this is before the deadline. `tls` encrypts the connection.
    Calls raise NoriaError; ValueError or TypeError for what cannot be sent at all.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        retry: bool = True,
        tls: Tls | None = None,
    ) -> None:
        self._address = checked_address(address)
        self._timeout = checked_timeout(timeout)
        key = find_api_key(api_key, address)
        warn_if_unencrypted(address, key, has_tls=tls is not None)
        self._metadata = key_metadata(key)
        self._calls = Calls(asyncio.Event, retry=retry)
        self._tls = opened_tls(tls)
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connection; calls still running are cancelled."""
        self._calls.end_all()
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close()

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> AsyncChatStream:
        """Ask and read the answer as it comes; the call starts on entering the block."""
        request = chat_pb2.StreamChatRequest(spec=chat_spec(messages, options))
        metadata = self._metadata + trace_metadata(options)
        return AsyncChatStream(
            lambda timeout: self._stub().StreamChat(request, timeout=timeout, metadata=metadata),
            self._calls.begin(self._deadline(options)),
        )

    async def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatResult:
        """Ask and wait for the whole answer."""
        request = chat_pb2.ChatRequest(spec=chat_spec(messages, options))
        metadata = self._metadata + trace_metadata(options)
        with self._calls.begin(self._deadline(options)) as attempts:
            response = await repeated_async(
                attempts,
                lambda timeout: self._stub().Chat(request, timeout=timeout, metadata=metadata),
            )
        return result_of(response)

    async def complete(self, prompt: RawPrompt, **options: Unpack[ChatOptions]) -> ChatResult:
        """Continue a raw prompt, to which no template is applied, and wait for all of it."""
        request = chat_pb2.CompletionRequest(spec=completion_spec(prompt, options))
        metadata = self._metadata + trace_metadata(options)
        with self._calls.begin(self._deadline(options)) as attempts:
            response = await repeated_async(
                attempts,
                lambda timeout: self._stub().Completion(
                    request, timeout=timeout, metadata=metadata
                ),
            )
        return result_of(response)

    async def cancel(self, request_id: str) -> None:
        """Cancel a request of one's own; one that has ended already is no error."""
        request = chat_pb2.CancelRequestRequest(request_id=request_id)
        with errors_of_call(lambda: request_id):
            await self._stub().CancelRequest(
                request, timeout=self._timeout, metadata=self._metadata
            )

    async def timeline(
        self, request_id: str, *, timeout: float | None = None
    ) -> common_pb2.Timeline:
        """Where the time of a request of one's own went, until now or its end."""
        request = chat_pb2.GetRequestRequest(request_id=request_id)
        with errors_of_call(lambda: request_id):
            record = await self._stub().GetRequest(
                request, timeout=timeout or self._timeout, metadata=self._metadata
            )
        told: common_pb2.Timeline = record.timeline
        return told

    def _stub(self) -> Any:
        # The channel belongs to the loop that first uses it, not to where the client was made.
        if self._channel is None:
            options = channel_options(self._address)
            self._channel = aio_channel(self._address, self._tls, options)
        return chat_pb2_grpc.ChatServiceStub(self._channel)

    def _deadline(self, options: ChatOptions) -> float:
        timeout = options.get("timeout")
        return self._timeout if timeout is None else checked_timeout(timeout)
