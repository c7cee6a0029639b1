"""The channel on which prompts go to a tokenizer; it lives as long as the router."""

import asyncio
from types import TracebackType
from typing import Self

import grpc

from noria.service.channel import CLIENT_OPTIONS, Options
from noria.service.tls import aio_channel
from noria.service.tls_files import TlsMaterial, TlsSource
from noria.v1 import tokenizer_pb2_grpc

# It comes back about as fast as the session does.
_OPTIONS: Options = (
    *CLIENT_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)
# What a replaced channel still answers takes no longer.
_LONGEST_CALL_S = 60.0


class EncodeChannel:
    """An asynchronous context manager; inside it `stub` may be called.

    Once the TLS files have changed, another channel takes its place: a broken connection of
    the old one would come back with what is no longer valid.
    """

    def __init__(self, address: str, tls: TlsSource | None) -> None:
        self._address = address
        self._tls = tls
        self._channel: grpc.aio.Channel | None = None
        self._material: TlsMaterial | None = None
        self._stub: tokenizer_pb2_grpc.TokenizerServiceAsyncStub
        self._closing: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)
        if self._channel is not None:
            await self._channel.close()

    def stub(self) -> "tokenizer_pb2_grpc.TokenizerServiceAsyncStub":
        """The tokenizer, by a channel with the files' present content."""
        if self._tls is not None and self._tls.material is not self._material:
            self._close_later()
            self._open()
        return self._stub

    def _open(self) -> None:
        self._material = None if self._tls is None else self._tls.material
        self._channel = aio_channel(self._address, self._tls, _OPTIONS)
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(self._channel)

    def _close_later(self) -> None:
        if self._channel is not None:
            task = asyncio.create_task(self._channel.close(_LONGEST_CALL_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
