"""TokenizerService on the wire. It only translates; the text service and sessions decide."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, Protocol

import grpc
import structlog
from prometheus_client.registry import CollectorRegistry

from noria.reasons import Reason, RequestError
from noria.service.errors import AbortableContext, abort
from noria.service.trace import Metadata, trace_of
from noria.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tokenizer_svc.decode_session import serve_session
from tokenizer_svc.decode_slots import DecodeSlots
from tokenizer_svc.encode_pool import EncodePool
from tokenizer_svc.metrics import TokenizerMetrics
from tokenizer_svc.text_service import TextService
from tokenizer_svc.translate import (
    chat_messages,
    check_text_size,
    text_size,
)

UnaryContext = grpc.aio.ServicerContext[Any, Any]
SessionContext = grpc.aio.ServicerContext[
    tokenizer_pb2.DecodeSessionRequest, tokenizer_pb2.DecodeSessionResponse
]


class CallContext(AbortableContext, Protocol):
    """The part of a grpc.aio servicer context that a call needs to be answered."""

    def invocation_metadata(self) -> Metadata | None: ...


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """All calls of the service; they wait until the model is loaded."""

    def __init__(
        self,
        pool: EncodePool,
        on_failure: Callable[[Exception], None],
        registry: CollectorRegistry,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool = pool
        self._on_failure = on_failure
        self._clock = clock
        self._ready: asyncio.Future[TextService] = asyncio.get_running_loop().create_future()
        self._sessions: set[DecodeSlots] = set()
        self._num_calls = 0
        self._draining = False
        self._metrics = TokenizerMetrics(registry, lambda: self.num_slots)

    def start(self, text: TextService) -> None:
        """Begin to serve."""
        self._ready.set_result(text)

    @property
    def num_slots(self) -> int:
        """Outputs being decoded now, in all sessions."""
        return sum(session.num_slots for session in self._sessions)

    @property
    def num_open(self) -> int:
        """What is not finished: outputs being decoded, and calls not yet answered."""
        return self.num_slots + self._num_calls

    def announce_draining(self) -> None:
        """Ask all routers, those that come later as well, to open new slots elsewhere."""
        self._draining = True
        for session in self._sessions:
            session.announce_draining()

    async def EncodeChat(  # noqa: N802 - the wire's name
        self, request: tokenizer_pb2.EncodeChatRequest, context: UnaryContext
    ) -> tokenizer_pb2.EncodeChatResponse:
        started = self._clock()
        async with self._counted(context) as text:
            text.check_model(request.spec.model)
            messages = chat_messages(request.spec)
            ids = await self._pool.run(text_size(messages), lambda: text.chat.encode(messages))
        return tokenizer_pb2.EncodeChatResponse(
            prompt_token_ids=ids, duration_us=self._encoded_us(started, len(ids))
        )

    async def Encode(  # noqa: N802 - the wire's name
        self, request: tokenizer_pb2.EncodeRequest, context: UnaryContext
    ) -> tokenizer_pb2.EncodeResponse:
        started = self._clock()
        async with self._counted(context) as text:
            text.check_model(request.model)
            size = len(request.text.encode())
            check_text_size("text", size)
            ids = await self._pool.run(
                size,
                lambda: text.codec.encode_raw(
                    request.text, add_special_tokens=request.add_special_tokens
                ),
            )
        return tokenizer_pb2.EncodeResponse(
            token_ids=ids, duration_us=self._encoded_us(started, len(ids))
        )

    async def Decode(  # noqa: N802 - the wire's name
        self, request: tokenizer_pb2.DecodeRequest, context: UnaryContext
    ) -> tokenizer_pb2.DecodeResponse:
        async with self._counted(context) as text:
            text.check_model(request.model)
            return tokenizer_pb2.DecodeResponse(pieces=text.decode(request.token_ids))

    async def GetTokenizerInfo(  # noqa: N802 - the wire's name
        self, request: tokenizer_pb2.GetTokenizerInfoRequest, context: UnaryContext
    ) -> tokenizer_pb2.GetTokenizerInfoResponse:
        async with self._counted(context) as text:
            text.check_model(request.model)
            return tokenizer_pb2.GetTokenizerInfoResponse(
                model=text.name,
                vocab_fingerprint=text.vocabulary.fingerprint,
                template_fingerprint=text.template_fingerprint,
                vocab_size=len(text.vocabulary),
                eos_token_ids=text.vocabulary.eos_token_ids,
                max_piece_bytes=text.vocabulary.max_piece_bytes,
            )

    # A coroutine that writes, not a generator that yields: when a call is cancelled, a
    # suspended generator's context managers would close whenever it is collected.
    async def DecodeSession(  # type: ignore[override]  # noqa: N802 - the wire's name
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.DecodeSessionRequest],
        context: SessionContext,
    ) -> None:
        # A status could not follow metadata that a first message is just taking along.
        await context.send_initial_metadata(())
        async with self._answering(context) as text:
            with self._session(text) as slots:
                await serve_session(
                    request_iterator,
                    context.write,
                    slots,
                    text,
                    on_ids=self._metrics.decoded,
                    clock=self._clock,
                )

    @contextlib.contextmanager
    def _session(self, text: TextService) -> Iterator[DecodeSlots]:
        slots = DecodeSlots(text.vocabulary, clock=self._clock)
        self._sessions.add(slots)
        if self._draining:
            slots.announce_draining()
        try:
            yield slots
        finally:
            self._sessions.discard(slots)

    @contextlib.asynccontextmanager
    async def _counted(self, context: CallContext) -> AsyncIterator[TextService]:
        """`_answering` for a call that has one answer, which draining waits for."""
        self._num_calls += 1
        try:
            async with self._answering(context) as text:
                yield text
        finally:
            self._num_calls -= 1

    @contextlib.asynccontextmanager
    async def _answering(self, context: CallContext) -> AsyncIterator[TextService]:
        """The text service, once it is loaded; what is raised becomes the call's status."""
        text = await asyncio.shield(self._ready)
        try:
            yield text
        except RequestError as error:
            await abort(context, error)
        except Exception as error:
            trace_id = trace_of(context.invocation_metadata() or ()).trace_id
            with structlog.contextvars.bound_contextvars(trace_id=trace_id):
                self._on_failure(error)
            await abort(context, RequestError(Reason.INTERNAL, "a defect in the tokenizer service"))

    def _encoded_us(self, started: float, num_ids: int) -> int:
        """Note an encoding that ends now; its duration in microseconds."""
        seconds = self._clock() - started
        self._metrics.encoded(seconds, num_ids)
        return round(seconds * 1e6)
