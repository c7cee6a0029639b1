"""One streamed answer: a context manager and an iterator of text pieces.

Leaving the block cancels what is still running, so a stream that nobody reads
costs nothing.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from noria.client.decode import REQUEST_ID_KEY, Metadata, error_of_rpc
from noria.client.errors import NoriaError, RequestCancelledError
from noria.client.result import AnswerBuilder, ChatResult
from noria.v1 import chat_pb2

# Starts the RPC; called on entering the block.
StartCall = Callable[[], Any]


class _Answer:
    """What both flavours know about the answer."""

    def __init__(self) -> None:
        self._builder = AnswerBuilder()
        self._call: Any = None
        self.request_id = ""

    def _started(self) -> Any:
        if self._call is None:
            raise RuntimeError("open the stream first: `with client.stream_chat(...) as stream:`")
        return self._call

    @property
    def result(self) -> ChatResult:
        """The whole answer, once the stream has ended. Raises RuntimeError before."""
        if not self._builder.stopped:
            raise RuntimeError("the stream has not ended; read it first")
        return self._builder.result(self.request_id)

    def cancel(self) -> None:
        """Stop the request; whoever reads the stream gets RequestCancelledError."""
        self._started().cancel()

    def _note_metadata(self, pairs: Any) -> None:
        self.request_id = Metadata.of(pairs).text(REQUEST_ID_KEY)

    def _check_end(self) -> None:
        if not self._builder.stopped:
            message = "the stream ended without message_stop"
            raise NoriaError(message, code=grpc.StatusCode.OK, request_id=self.request_id)


def _task_is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ChatStream(_Answer):
    """A streamed answer. Use it as `with client.stream_chat(...) as stream`.

    Iterating gives pieces of text as they come; `events()` gives the events
    themselves. `request_id` is known on entering. Both raise NoriaError.
    """

    def __init__(self, start: StartCall) -> None:
        super().__init__()
        self._start = start

    def __enter__(self) -> Self:
        self._call = self._start()
        try:
            self._note_metadata(self._call.initial_metadata())
        except BaseException:
            self._call.cancel()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._started().cancel()

    def events(self) -> Iterator[chat_pb2.StreamEvent]:
        """The remaining events of the stream."""
        try:
            for response in self._started():
                self._builder.add(response.event)
                yield response.event
        except grpc.RpcError as error:
            raise error_of_rpc(error, self.request_id) from None
        self._check_end()

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if event.choice == 0 and event.content_block_delta.text:
                yield event.content_block_delta.text


class AsyncChatStream(_Answer):
    """A streamed answer. Use it as `async with client.stream_chat(...) as stream`.

    Iterating gives pieces of text as they come; `events()` gives the events
    themselves. `request_id` is known on entering. Both raise NoriaError.
    """

    def __init__(self, start: StartCall) -> None:
        super().__init__()
        self._start = start

    async def __aenter__(self) -> Self:
        self._call = self._start()
        try:
            self._note_metadata(await self._call.initial_metadata())
        except BaseException:
            self._call.cancel()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._started().cancel()

    async def events(self) -> AsyncIterator[chat_pb2.StreamEvent]:
        """The remaining events of the stream."""
        try:
            async for response in self._started():
                self._builder.add(response.event)
                yield response.event
        except grpc.RpcError as error:
            raise error_of_rpc(error, self.request_id) from None
        except asyncio.CancelledError:
            # grpc.aio raises this for `cancel()` too; only the reader's own task may be cancelled.
            if _task_is_cancelled():
                raise
            message = "cancelled by the client"
            raise RequestCancelledError(
                message, code=grpc.StatusCode.CANCELLED, request_id=self.request_id
            ) from None
        self._check_end()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.events():
            if event.choice == 0 and event.content_block_delta.text:
                yield event.content_block_delta.text
