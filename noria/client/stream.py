"""One streamed answer: a context manager and an iterator of text pieces.

Leaving the block cancels what is still running, so a stream that nobody reads
costs nothing.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any, Generic, Self

import grpc

from noria.client.decode import REQUEST_ID_KEY, Metadata, error_of_rpc
from noria.client.errors import NoriaError
from noria.client.result import AnswerBuilder, ChatResult
from noria.client.retry import Attempts, Event, errors_of_call, pause, pause_async
from noria.v1 import chat_pb2

# Starts the RPC with a timeout in seconds: on entering the block, and again after a refusal.
StartCall = Callable[[float], Any]


class _Answer(Generic[Event]):
    """What both flavours know about the answer."""

    def __init__(self, start: StartCall, begin: AbstractContextManager[Attempts[Event]]) -> None:
        self._start = start
        self._begin = begin
        self._attempts: Attempts[Event]
        self._held = ExitStack()
        self._builder = AnswerBuilder()
        self._call: Any = None
        self._has_events = False
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
        self._started()
        self._attempts.ended.set()
        self._call.cancel()

    def _start_call(self) -> None:
        self._call = self._start(self._attempts.left())
        # `cancel` may have come just before, and stopped the attempt before this one.
        if self._attempts.ended.is_set():
            self._call.cancel()

    def _take(self, event: chat_pb2.StreamEvent) -> chat_pb2.StreamEvent:
        self._has_events = True
        self._builder.add(event)
        return event

    def _note_metadata(self, pairs: Any) -> None:
        self.request_id = Metadata.of(pairs).text(REQUEST_ID_KEY)

    def _check_end(self) -> None:
        if not self._builder.stopped:
            message = "the stream ended without message_stop"
            raise NoriaError(message, code=grpc.StatusCode.OK, request_id=self.request_id)


class ChatStream(_Answer[threading.Event]):
    """A streamed answer. Use it as `with client.stream_chat(...) as stream`.

    Iterating gives pieces of the first choice's text as they come; `events()` gives the
    events themselves, of all choices. `request_id` is known on entering, and new after
    each refusal that is tried again. Both raise NoriaError.
    """

    def __enter__(self) -> Self:
        with ExitStack() as held:
            self._attempts = held.enter_context(self._begin)
            held.callback(lambda: self._call and self._call.cancel())
            self._attempt()
            self._held = held.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._held.close()

    def events(self) -> Iterator[chat_pb2.StreamEvent]:
        """The remaining events of the stream."""
        while True:
            try:
                for response in self._started():
                    yield self._take(response.event)
                break
            except grpc.RpcError as error:
                failure = error_of_rpc(error, self.request_id)
            self._attempt_after(failure)
        self._check_end()

    def __iter__(self) -> Iterator[str]:
        for event in self.events():
            if event.choice == 0 and event.content_block_delta.text:
                yield event.content_block_delta.text

    def _attempt_after(self, failure: NoriaError) -> None:
        if self._has_events:
            raise failure
        pause(self._attempts, failure)
        self._attempt()

    def _attempt(self) -> None:
        self._start_call()
        self._note_metadata(self._call.initial_metadata())


class AsyncChatStream(_Answer[asyncio.Event]):
    """A streamed answer. Use it as `async with client.stream_chat(...) as stream`.

    Iterating gives pieces of the first choice's text as they come; `events()` gives the
    events themselves, of all choices. `request_id` is known on entering, and new after
    each refusal that is tried again. Both raise NoriaError.
    """

    async def __aenter__(self) -> Self:
        with ExitStack() as held:
            self._attempts = held.enter_context(self._begin)
            held.callback(lambda: self._call and self._call.cancel())
            await self._attempt()
            self._held = held.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._held.close()

    async def events(self) -> AsyncIterator[chat_pb2.StreamEvent]:
        """The remaining events of the stream."""
        while True:
            try:
                with errors_of_call(lambda: self.request_id):
                    async for response in self._started():
                        yield self._take(response.event)
                break
            except NoriaError as error:
                failure = error
            await self._attempt_after(failure)
        self._check_end()

    async def __aiter__(self) -> AsyncIterator[str]:
        async for event in self.events():
            if event.choice == 0 and event.content_block_delta.text:
                yield event.content_block_delta.text

    async def _attempt_after(self, failure: NoriaError) -> None:
        if self._has_events:
            raise failure
        await pause_async(self._attempts, failure)
        await self._attempt()

    async def _attempt(self) -> None:
        self._start_call()
        with errors_of_call(lambda: self.request_id):
            self._note_metadata(await self._call.initial_metadata())
