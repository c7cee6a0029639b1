"""The client of operators: calls a router's AdminService."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from noria.client.connection import (
    channel_options,
    checked_address,
    find_api_key,
    key_metadata,
    warn_if_unencrypted,
)
from noria.client.decode import error_of_rpc
from noria.client.tls import Tls, opened_tls
from noria.service.tls import channel
from noria.v1 import admin_pb2_grpc, chat_pb2_grpc

T = TypeVar("T")


class AdminClient:
    """Use it in a `with` block; address, key and TLS are given as to `Client`.

    `call(client.stub.ListKeys, request)` gives the response or raises NoriaError; `chat` has the
    ChatService, for what is asked of it by and about tenants.
    """

    def __init__(
        self,
        address: str = "localhost:50051",
        *,
        api_key: str | None = None,
        timeout: float = 30.0,
        tls: Tls | None = None,
    ) -> None:
        self._timeout = timeout
        key = find_api_key(api_key, address)
        warn_if_unencrypted(address, key, has_tls=tls is not None)
        self._metadata = key_metadata(key)
        options = channel_options(checked_address(address))
        self._channel = channel(address, opened_tls(tls), options)
        self.stub = admin_pb2_grpc.AdminServiceStub(self._channel)
        self.chat = chat_pb2_grpc.ChatServiceStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._channel.close()

    def call(self, method: Callable[..., T], request: Any) -> T:
        """Raises NoriaError."""
        try:
            return method(request, timeout=self._timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            raise error_of_rpc(error) from None
