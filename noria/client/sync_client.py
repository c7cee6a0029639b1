"""The client for ordinary code."""

from types import TracebackType
from typing import Self, Unpack

import grpc

from noria.client.connection import channel_options, checked_address, find_api_key, key_metadata
from noria.client.decode import error_of_rpc
from noria.client.request import ChatOptions, Messages, chat_spec, checked_timeout
from noria.client.result import ChatResult, result_of
from noria.client.stream import ChatStream
from noria.v1 import chat_pb2, chat_pb2_grpc


class Client:
    """Calls a Noria server; may be shared by threads. Use it in a `with` block.

    `api_key`: left out, it is NORIA_API_KEY or what `noria up` wrote. `timeout`
    is every call's deadline in seconds unless the call names its own. Calls raise
    NoriaError; ValueError or TypeError for what cannot be sent at all.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
    ) -> None:
        self._timeout = checked_timeout(timeout)
        self._metadata = key_metadata(find_api_key(api_key))
        options = channel_options(checked_address(address))
        self._channel = grpc.insecure_channel(address, options=options)
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
        self._channel.close()

    def stream_chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatStream:
        """Ask and read the answer as it comes; the call starts on entering the block."""
        request = chat_pb2.StreamChatRequest(spec=chat_spec(messages, options))
        timeout = self._deadline(options)
        return ChatStream(
            lambda: self._stub.StreamChat(request, timeout=timeout, metadata=self._metadata)
        )

    def chat(self, messages: Messages, **options: Unpack[ChatOptions]) -> ChatResult:
        """Ask and wait for the whole answer."""
        request = chat_pb2.ChatRequest(spec=chat_spec(messages, options))
        timeout = self._deadline(options)
        try:
            return result_of(self._stub.Chat(request, timeout=timeout, metadata=self._metadata))
        except grpc.RpcError as error:
            raise error_of_rpc(error) from None

    def cancel(self, request_id: str) -> None:
        """Cancel a request of one's own; one that has ended already is no error."""
        request = chat_pb2.CancelRequestRequest(request_id=request_id)
        try:
            self._stub.CancelRequest(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of_rpc(error, request_id) from None

    def _deadline(self, options: ChatOptions) -> float:
        timeout = options.get("timeout")
        return self._timeout if timeout is None else checked_timeout(timeout)
