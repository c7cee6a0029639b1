"""TokenizerService on the wire. It only translates; the text service and sessions decide."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from typing import Any

import grpc
from prometheus_client.registry import CollectorRegistry

from noria.reasons import Reason, RequestError
from noria.service.errors import AbortableContext, abort
from noria.service.limits import SESSION_STALL_SECONDS
from noria.service.outbox import Outbox, OutboxClosedError
from noria.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tokenizer_svc.decode_slots import DecodeSlots, PendingTexts
from tokenizer_svc.encode_pool import EncodePool
from tokenizer_svc.metrics import TokenizerMetrics
from tokenizer_svc.text_service import TextService
from tokenizer_svc.translate import (
    chat_messages,
    check_text_size,
    responses,
    slot_options,
    text_size,
)

# Ids decoded at a stretch before other calls get their turn.
IDS_PER_TURN = 4096

UnaryContext = grpc.aio.ServicerContext[Any, Any]
SessionContext = grpc.aio.ServicerContext[
    tokenizer_pb2.DecodeSessionRequest, tokenizer_pb2.DecodeSessionResponse
]


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
        self._metrics = TokenizerMetrics(registry, lambda: self.num_slots)

    def start(self, text: TextService) -> None:
        """Begin to serve."""
        self._ready.set_result(text)

    @property
    def num_slots(self) -> int:
        """Outputs being decoded now, in all sessions."""
        return sum(session.num_slots for session in self._sessions)

    def announce_draining(self) -> None:
        """Ask all routers to open new slots elsewhere."""
        for session in self._sessions:
            session.announce_draining()

    async def EncodeChat(  # noqa: N802 - the wire's name
        self, request: tokenizer_pb2.EncodeChatRequest, context: UnaryContext
    ) -> tokenizer_pb2.EncodeChatResponse:
        started = self._clock()
        async with self._answering(context) as text:
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
        async with self._answering(context) as text:
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
        async with self._answering(context) as text:
            text.check_model(request.model)
            return tokenizer_pb2.DecodeResponse(pieces=text.decode(request.token_ids))

    async def GetTokenizerInfo(  # noqa: N802 - the wire's name
        self, request: tokenizer_pb2.GetTokenizerInfoRequest, context: UnaryContext
    ) -> tokenizer_pb2.GetTokenizerInfoResponse:
        async with self._answering(context) as text:
            text.check_model(request.model)
            return tokenizer_pb2.GetTokenizerInfoResponse(
                model=text.name,
                vocab_fingerprint=text.vocabulary.fingerprint,
                template_fingerprint=text.template_fingerprint,
                vocab_size=len(text.vocabulary),
                eos_token_ids=text.vocabulary.eos_token_ids,
            )

    # A coroutine that writes, not a generator that yields: when a call is cancelled, a
    # suspended generator's context managers would close whenever it is collected.
    async def DecodeSession(  # type: ignore[override]  # noqa: N802 - the wire's name
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.DecodeSessionRequest],
        context: SessionContext,
    ) -> None:
        async with self._answering(context) as text:
            with self._session(text) as slots:
                await _all_of(
                    _read(request_iterator, slots, text, self._metrics.decoded),
                    _write(slots.outbox, context.write, self._clock),
                )

    @contextlib.contextmanager
    def _session(self, text: TextService) -> Iterator[DecodeSlots]:
        slots = DecodeSlots(text.vocabulary, clock=self._clock)
        self._sessions.add(slots)
        try:
            yield slots
        finally:
            self._sessions.discard(slots)

    @contextlib.asynccontextmanager
    async def _answering(self, context: AbortableContext) -> AsyncIterator[TextService]:
        """The text service, once it is loaded; what is raised becomes the call's status."""
        text = await asyncio.shield(self._ready)
        try:
            yield text
        except RequestError as error:
            await abort(context, error)
        except Exception as error:
            self._on_failure(error)
            await abort(context, RequestError(Reason.INTERNAL, "a defect in the tokenizer service"))

    def _encoded_us(self, started: float, num_ids: int) -> int:
        """Note an encoding that ends now; its duration in microseconds."""
        seconds = self._clock() - started
        self._metrics.encoded(seconds, num_ids)
        return round(seconds * 1e6)


async def _read(
    requests: AsyncIterator[tokenizer_pb2.DecodeSessionRequest],
    slots: DecodeSlots,
    text: TextService,
    on_ids: Callable[[int], None],
) -> None:
    """Take in the router's messages until it ends its side; the outbox then closes."""
    try:
        async for request in requests:
            if slots.outbox.waiting_s() > SESSION_STALL_SECONDS:
                raise RequestError(
                    Reason.SLOW_READER,
                    f"texts have waited for {slots.outbox.waiting_s():.0f} s to be read; "
                    f"at most {SESSION_STALL_SECONDS:.0f} s",
                )
            on_ids(_num_ids(request))
            await _apply(request, slots, text)
    finally:
        slots.outbox.close()


def _num_ids(request: tokenizer_pb2.DecodeSessionRequest) -> int:
    """How many ids a message brings to be decoded."""
    fed = sum(len(delta.token_ids) for delta in request.batch.deltas)
    return fed + len(request.open.output_token_ids)


async def _apply(
    request: tokenizer_pb2.DecodeSessionRequest, slots: DecodeSlots, text: TextService
) -> None:
    match request.WhichOneof("message"):
        case "open":
            await _open(request.open, slots, text)
        case "batch":
            for delta in request.batch.deltas:
                wanted = [*delta.token_ids] if delta.want_pieces else []
                await _feed(slots, delta.slot, delta.token_ids, [*wanted, *delta.alternative_ids])
        case "close":
            slots.close(request.close.slot, flush=request.close.flush)
        case _:
            # A message of a later version: nothing to do.
            pass


async def _open(opened: tokenizer_pb2.DecodeOpen, slots: DecodeSlots, text: TextService) -> None:
    try:
        text.check_model(opened.model)
    except RequestError as error:
        slots.fail(opened.slot, error.message)
        return
    slots.open(opened.slot, slot_options(opened))
    if opened.output_token_ids:
        await _feed(slots, opened.slot, opened.output_token_ids)


async def _feed(
    slots: DecodeSlots, slot: int, token_ids: Sequence[int], wanted_ids: Sequence[int] = ()
) -> None:
    """Feed a slot; a long list in parts, between which other calls get their turn."""
    slots.feed(slot, token_ids[:IDS_PER_TURN], wanted_ids)
    for start in range(IDS_PER_TURN, len(token_ids), IDS_PER_TURN):
        await asyncio.sleep(0)
        slots.feed(slot, token_ids[start : start + IDS_PER_TURN])


async def _all_of(*parts: Coroutine[Any, Any, None]) -> None:
    """Run all parts to their end, or until one fails; the others are then cancelled."""
    tasks = [asyncio.ensure_future(part) for part in parts]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _write(
    outbox: Outbox[PendingTexts],
    write: Callable[[tokenizer_pb2.DecodeSessionResponse], Coroutine[Any, Any, None]],
    clock: Callable[[], float],
) -> None:
    with contextlib.suppress(OutboxClosedError):
        while True:
            for pending in await outbox.take():
                for response in responses(pending, clock()):
                    await write(response)
