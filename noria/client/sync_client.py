"""The client for ordinary code."""

import threading
from types import TracebackType
from typing import Self, Unpack

import grpc

from noria.client.connection import (
    channel_options,
    checked_address,
    find_api_key,
    key_metadata,
    warn_if_unencrypted,
)
from noria.client.decode import error_of_rpc
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
from noria.client.retry import Calls, repeated
from noria.client.stream import ChatStream
from noria.client.tls import Tls, opened_tls
from noria.service.tls import channel
from noria.v1 import chat_pb2, chat_pb2_grpc, common_pb2


class Client:
    """Calls a Noria server; may be shared by threads. Use it in a `with` block.

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
        self._timeout = checked_timeout(timeout)
        key = find_api_key(api_key, address)
        warn_if_unencrypted(address, key, has_tls=tls is not None)
        self._metadata = key_metadata(key)
        self._calls = Calls(threading.Event, retry=retry)
        options = channel_options(checked_address(address))
        self._channel = channel(address, opened_tls(tls), options)
        self._stub = chat_pb2_grpc.ChatServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; calls still running are cancelled."""
        self._calls.end_all()
        self._channel.close()

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatStream:
        """Ask and read the answer as it comes; the call starts on entering the block."""
        request = chat_pb2.StreamChatRequest(spec=chat_spec(messages, options))
        metadata = self._metadata + trace_metadata(options)
        return ChatStream(
            lambda timeout: self._stub.StreamChat(request, timeout=timeout, metadata=metadata),
            self._calls.begin(self._deadline(options)),
        )

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatResult:
        """Ask and wait for the whole answer."""
        request = chat_pb2.ChatRequest(spec=chat_spec(messages, options))
        metadata = self._metadata + trace_metadata(options)
        with self._calls.begin(self._deadline(options)) as attempts:
            response = repeated(
                attempts,
                lambda timeout: self._stub.Chat(request, timeout=timeout, metadata=metadata),
            )
        return result_of(response)

    def complete(self, prompt: RawPrompt, **options: Unpack[ChatOptions]) -> ChatResult:
        """Continue a raw prompt, to which no template is applied, and wait for all of it."""
        request = chat_pb2.CompletionRequest(spec=completion_spec(prompt, options))
        metadata = self._metadata + trace_metadata(options)
        with self._calls.begin(self._deadline(options)) as attempts:
            response = repeated(
                attempts,
                lambda timeout: self._stub.Completion(request, timeout=timeout, metadata=metadata),
            )
        return result_of(response)

    def cancel(self, request_id: str) -> None:
        """Cancel a request of one's own; one that has ended already is no error."""
        request = chat_pb2.CancelRequestRequest(request_id=request_id)
        try:
            self._stub.CancelRequest(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of_rpc(error, request_id) from None

    def timeline(self, request_id: str, *, timeout: float | None = None) -> common_pb2.Timeline:
        """Where the time of a request of one's own went, until now or its end."""
        request = chat_pb2.GetRequestRequest(request_id=request_id)
        try:
            record = self._stub.GetRequest(
                request, timeout=timeout or self._timeout, metadata=self._metadata
            )
        except grpc.RpcError as error:
            raise error_of_rpc(error, request_id) from None
        told: common_pb2.Timeline = record.timeline
        return told

    def _deadline(self, options: ChatOptions) -> float:
        timeout = options.get("timeout")
        return self._timeout if timeout is None else checked_timeout(timeout)
