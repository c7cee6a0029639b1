"""One tokenizer service: kept connected; prompts into ids, decode slots.

While it is away, running requests wait with their text up to a patience; after that they end
with TOKENIZER_LOST.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
import structlog
from google.protobuf.message import DecodeError

from noria.reasons import Reason, RequestError
from noria.service.errors import DETAILS_KEY, parse_status_details
from noria.service.tls import aio_channel, break_cause
from noria.service.tls_files import TlsSource
from noria.service.trace import TRACEPARENT
from noria.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from router import wire_tokenizer
from router.connection import SESSION_OPTIONS, keep_connected
from router.decode_session import DecodeSession
from router.encode_channel import EncodeChannel
from router.requests import Conversation, EncodedPrompt, RawText

# A tokenizer that still loads answers once it is ready.
_INFO_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a tokenizer says of itself. 0 `max_piece_bytes`: not told."""

    model: str = ""
    vocab_size: int = 0
    max_piece_bytes: int = 0


class Tokenizer:
    """One tokenizer service.

    `on_info` hears what it says of itself each time it comes, before it is up; `on_change`
    is called whenever it comes or goes.
    """

    def __init__(
        self,
        address: str,
        *,
        tls: TlsSource | None,
        patience_s: float,
        on_info: Callable[["Tokenizer", tokenizer_pb2.GetTokenizerInfoResponse], None],
        on_change: Callable[[], None],
        log: structlog.typing.FilteringBoundLogger,
    ) -> None:
        self.address = address
        self._tls = tls
        self._patience_s = patience_s
        self._on_info = on_info
        self._on_change = on_change
        self._log = log.bind(tokenizer=address)
        self._patience: asyncio.TimerHandle | None = None
        self._last_break = ""
        self._channel = EncodeChannel(address, tls)
        self.facts = TokenizerFacts()
        self.is_up = False
        self.slots = DecodeSession()

    @contextlib.asynccontextmanager
    async def encoding(self) -> AsyncIterator[None]:
        """Inside the block `encode` may be called, whether or not it runs."""
        async with self._channel:
            try:
                yield
            finally:
                self._stop_patience()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        await keep_connected(self._connect, self._on_break)

    async def encode(
        self, prompt: Conversation | RawText, timeout_s: float, traceparent: str
    ) -> EncodedPrompt:
        """The prompt's ids. Raises grpc.aio.AioRpcError."""
        timeout, metadata = max(timeout_s, 0), ((TRACEPARENT, traceparent),)
        stub = self._channel.stub()
        if isinstance(prompt, RawText):
            text = wire_tokenizer.encode_text_request(prompt, self.facts.model)
            encoded = await stub.Encode(text, timeout=timeout, metadata=metadata)
            return EncodedPrompt(list(encoded.token_ids), duration_us=encoded.duration_us)
        chat = wire_tokenizer.encode_chat_request(prompt, self.facts.model)
        response = await stub.EncodeChat(chat, timeout=timeout, metadata=metadata)
        return EncodedPrompt(
            list(response.prompt_token_ids), response.starts_in_thinking, response.duration_us
        )

    async def _connect(self) -> None:
        async with aio_channel(self.address, self._tls, SESSION_OPTIONS) as channel:
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
        self._stop_patience()
        self._last_break = ""
        self.facts = TokenizerFacts(info.model, info.vocab_size, info.max_piece_bytes)
        self._log.info("tokenizer_connected", model=info.model)
        self._on_info(self, info)
        self.is_up = True
        self._on_change()

    def _go_down(self) -> None:
        """Open nothing new here; what is open goes on while the session lasts."""
        self.is_up = False
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
            cause = break_cause(error)
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
