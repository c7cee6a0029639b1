"""The tokenizer service: kept connected; prompts into ids, decode slots.

While it is away, requests wait for it up to a patience: new ones before their encoding,
running ones with their text. After that they end with NO_TOKENIZER or TOKENIZER_LOST.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable

import grpc
import structlog
from google.protobuf.message import DecodeError

from noria.reasons import Reason, RequestError
from noria.service.channel import CLIENT_OPTIONS, Options
from noria.service.errors import DETAILS_KEY, parse_status_details
from noria.service.trace import TRACEPARENT
from noria.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from router import wire_tokenizer
from router.connection import SESSION_OPTIONS, keep_connected
from router.decode_session import DecodeSession
from router.prompt_size import check_fits
from router.registry import Registry
from router.requests import (
    Conversation,
    EncodedPrompt,
    Prompt,
    RawIds,
    RawText,
    check_ids,
)

# The channel for encoding lives as long as the router and comes back about as fast as
# the session does.
_ENCODE_OPTIONS: Options = (
    *CLIENT_OPTIONS,
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

# A tokenizer that still loads answers once it is ready.
_INFO_TIMEOUT_S = 60.0


class Tokenizer:
    """One tokenizer service.

    `on_change` is called when it comes or goes, `on_new_vocabulary` when it comes back with
    another vocabulary: whatever ids were made before mean something else from then on.
    """

    def __init__(
        self,
        address: str,
        registry: Registry,
        *,
        patience_s: float,
        on_change: Callable[[], None],
        on_new_vocabulary: Callable[[], None],
        clock: Callable[[], float],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self._address = address
        self._registry = registry
        self._patience_s = patience_s
        self._on_change = on_change
        self._on_new_vocabulary = on_new_vocabulary
        self._clock = clock
        self._log = log.bind(tokenizer=address)
        self._up = asyncio.Event()
        self._model = ""
        self._vocab_size = 0
        self._max_piece_bytes = 0
        self._patience: asyncio.TimerHandle | None = None
        self._last_break = ""
        self._encoder: tokenizer_pb2_grpc.TokenizerServiceAsyncStub
        self.slots = DecodeSession()

    @property
    def is_up(self) -> bool:
        return self._up.is_set()

    @contextlib.asynccontextmanager
    async def encoding(self) -> AsyncIterator[None]:
        """Inside the block `encode` may be called, whether or not it runs."""
        async with grpc.aio.insecure_channel(self._address, options=_ENCODE_OPTIONS) as channel:
            self._encoder = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            try:
                yield
            finally:
                self._stop_patience()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        await keep_connected(self._connect, self._on_break)

    async def encode(self, prompt: Prompt, deadline: float, traceparent: str) -> EncodedPrompt:
        """The prompt's ids. Waits for a tokenizer that is away, up to the patience.

        Raises what the tokenizer refuses, NO_TOKENIZER, DEADLINE_EXCEEDED, and
        CONTEXT_LENGTH_EXCEEDED for a text that is too long whatever its ids are.
        """
        if isinstance(prompt, RawIds):
            return EncodedPrompt(check_ids(prompt.token_ids, self._vocab_size))
        check_fits(prompt, self._longest_context(), self._max_piece_bytes)
        give_up = self._clock() + self._patience_s
        while True:
            await self._wait_up(give_up - self._clock())
            try:
                return await self._encode_once(prompt, deadline - self._clock(), traceparent)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE or self._clock() >= give_up:
                    raise request_error(error) from error
            # The session hears of the break, too, but perhaps a moment later.
            await asyncio.sleep(0.05)

    def _longest_context(self) -> int:
        usable = (worker for worker in self._registry if self._registry.understands(worker))
        return max((worker.figures.max_model_len for worker in usable), default=0)

    async def _encode_once(
        self, prompt: Conversation | RawText, timeout_s: float, traceparent: str
    ) -> EncodedPrompt:
        timeout, metadata = max(timeout_s, 0), ((TRACEPARENT, traceparent),)
        if isinstance(prompt, RawText):
            text = wire_tokenizer.encode_text_request(prompt, self._model)
            encoded = await self._encoder.Encode(text, timeout=timeout, metadata=metadata)
            return EncodedPrompt(list(encoded.token_ids), duration_us=encoded.duration_us)
        chat = wire_tokenizer.encode_chat_request(prompt, self._model)
        response = await self._encoder.EncodeChat(chat, timeout=timeout, metadata=metadata)
        return EncodedPrompt(
            list(response.prompt_token_ids), response.starts_in_thinking, response.duration_us
        )

    async def _wait_up(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(max(timeout_s, 0)):
                await self._up.wait()
        except TimeoutError:
            raise RequestError(Reason.NO_TOKENIZER, "no tokenizer is connected") from None

    async def _connect(self) -> None:
        async with grpc.aio.insecure_channel(self._address, options=SESSION_OPTIONS) as channel:
            stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
            info = await stub.GetTokenizerInfo(
                tokenizer_pb2.GetTokenizerInfoRequest(), timeout=_INFO_TIMEOUT_S
            )
            call = stub.DecodeSession()
            self._come_up(info)
            try:
                await self.slots.serve(call, info.model, self._go_down)
            finally:
                self._go_down()
                self._start_patience()

    def _come_up(self, info: tokenizer_pb2.GetTokenizerInfoResponse) -> None:
        known = self._registry.vocab_fingerprint
        if known is not None and known != info.vocab_fingerprint:
            self._on_new_vocabulary()
        self._stop_patience()
        self._last_break = ""
        self._model, self._vocab_size = info.model, info.vocab_size
        self._max_piece_bytes = info.max_piece_bytes
        self._registry.vocab_fingerprint = info.vocab_fingerprint
        self._up.set()
        self._log.info("tokenizer_connected", model=info.model)
        for worker in self._registry:
            if not self._registry.understands(worker):
                theirs = worker.figures.vocab_fingerprint
                self._log.error(
                    "vocabulary_mismatch",
                    tokenizer=info.vocab_fingerprint,
                    worker=theirs,
                    worker_id=worker.worker_id,
                )
        self._on_change()

    def _go_down(self) -> None:
        """Open nothing new here; what is open goes on while the session lasts."""
        self._up.clear()
        self._on_change()

    def _start_patience(self) -> None:
        self._stop_patience()
        lost = f"the tokenizer has been away for {self._patience_s:g} s"
        loop = asyncio.get_running_loop()
        self._patience = loop.call_later(self._patience_s, self._lose_slots, lost)

    def _stop_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None

    def _lose_slots(self, why: str) -> None:
        self.slots.fail_all(RequestError(Reason.TOKENIZER_LOST, why))

    def _on_break(self, error: Exception | None) -> None:
        """Log each new kind of break once, not every failed attempt to come back."""
        cause = "closed by the tokenizer"
        if isinstance(error, grpc.aio.AioRpcError):
            cause = error.code().name
        elif error is not None:
            cause = type(error).__name__
        if cause != self._last_break:
            self._log.warning("tokenizer_disconnected", cause=cause)
        self._last_break = cause


def request_error(error: grpc.aio.AioRpcError) -> RequestError:
    """What a failed call to the tokenizer means for the caller."""
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return RequestError(Reason.DEADLINE_EXCEEDED, "the deadline passed while encoding")
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        return RequestError(Reason.NO_TOKENIZER, "no tokenizer is connected")
    details = dict(error.trailing_metadata() or ()).get(DETAILS_KEY)
    if isinstance(details, bytes):
        try:
            refusal = parse_status_details(details)
        except (DecodeError, ValueError):
            refusal = None
        if refusal is not None:
            return refusal
    return RequestError(Reason.INTERNAL, "the tokenizer failed")
